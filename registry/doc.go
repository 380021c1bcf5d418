// Package registry is the internal image registry of the controller: CNCF
// distribution, embedded, on a folder of the controller, served over the
// service link "registry" and nowhere else. It owns who may pull and push
// what, and which stored images are removed.
//
// It does not know policies or workloads: Grants and Config.Keep say what a
// node may do and what has to stay.
//
// distribution logs to the global logger of logrus, which New directs to the
// logger of the configuration. All exported types may be used by several
// goroutines at once.
package registry
