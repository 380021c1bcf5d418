// Package templates holds the nginx configuration templates of the ingress
// node. It only embeds them; package ingress/render fills them in. The file
// system is read-only, so concurrent use is safe.
package templates

import "embed"

// FS holds nginx.conf.tmpl, http.conf.tmpl and stream.conf.tmpl.
//
//go:embed *.tmpl
var FS embed.FS
