// Package render turns routes and services into nginx configuration files and
// proves that the files say what was meant: every value passes an allow-list,
// the text is parsed back and compared with the tree that harmless values
// would have given.
//
// It reads and writes no files and runs no nginx. A Renderer may be used
// concurrently.
package render
