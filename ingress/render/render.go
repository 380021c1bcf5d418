package render

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"text/template"

	crossplane "github.com/nginxinc/nginx-go-crossplane"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/templates"
	"github.com/opfield/availability/upstream"
)

// The files of a generation.
const (
	MainFile   = "nginx.conf" // only for our own nginx
	HTTPFile   = "http.conf"
	StreamFile = "stream.conf"
)

// unnamed stands where the generation's ID will stand: the ID is the hash of
// the content around it. No value can contain it, because of the percent signs.
const unnamed = "opf%generation%x"

// Renderer renders generations.
type Renderer struct {
	config Config
	files  []string
	texts  map[string]string
}

// New reads the templates; an override that cannot be parsed is an error.
func New(c Config) (*Renderer, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	r := &Renderer{config: c, texts: map[string]string{}}
	if !c.Include {
		r.files = append(r.files, MainFile)
	}
	r.files = append(r.files, HTTPFile)
	if c.Build.Stream {
		r.files = append(r.files, StreamFile)
	}
	for _, f := range r.files {
		text, err := readTemplate(c.Templates, f+".tmpl")
		if err != nil {
			return nil, err
		}
		if _, err := parseTemplate(f, text, plain{}); err != nil {
			return nil, err
		}
		r.texts[f] = text
	}
	return r, nil
}

func readTemplate(override map[string]string, name string) (string, error) {
	if text, ok := override[name]; ok {
		return text, nil
	}
	b, err := fs.ReadFile(templates.FS, name)
	if err != nil {
		return "", fmt.Errorf("read template: %w", err)
	}
	return string(b), nil
}

// writer is how a template writes a user's words: as they are, or as a
// placeholder.
type writer interface {
	value(text string) (string, error)
}

func parseTemplate(name, text string, w writer) (*template.Template, error) {
	t, err := template.New(name).Funcs(template.FuncMap{
		"v":  w.value,
		"re": func(s string) (string, error) { return w.value(escapePattern(s)) },
	}).Parse(text)
	if err != nil {
		return nil, fmt.Errorf("parse template: %w", err)
	}
	return t, nil
}

// escapePattern makes a path match itself in a regular expression. Of what
// the allow-list admits only '.' has a meaning there; a backslash is avoided
// because quoting treats it specially.
func escapePattern(s string) string { return strings.ReplaceAll(s, ".", "[.]") }

// Render renders a generation and checks that it is what was meant. The same
// input in any order gives the same bytes.
func (r *Renderer) Render(in Input) (Generation, error) {
	var checked []upstream.Route
	for _, route := range in.Routes {
		n, err := route.Normalised()
		if err != nil {
			return Generation{}, fmt.Errorf("route %s: %w", printable(route.Name), err)
		}
		checked = append(checked, n)
	}
	in.Routes = checked
	for _, s := range in.Services {
		for _, id := range slices.Concat(s.Open, s.Others) {
			if err := id.Placement.Check(); err != nil {
				return Generation{}, fmt.Errorf("service: %w", err)
			}
		}
	}
	if in.Identity != "" && !identityPattern.MatchString(in.Identity) {
		return Generation{}, fmt.Errorf("identity: want hexadecimal digits")
	}
	m, err := newModel(r.config, in)
	if err != nil {
		return Generation{}, err
	}
	g := Generation{}
	for _, route := range in.Routes {
		g.Routes = append(g.Routes, route.Name)
	}
	slices.Sort(g.Routes)
	g.Primaries = primaries(in.Services)
	m.Generation = unnamed
	sum := sha256.New()
	for _, f := range r.files {
		real, err := r.checked(f, m)
		if err != nil {
			return Generation{}, err
		}
		g.Files = append(g.Files, File{Name: f, Data: real})
	}
	if err := r.user(&g, in.User); err != nil {
		return Generation{}, err
	}
	for _, f := range g.Files {
		fmt.Fprintf(sum, "%s %d\n", f.Name, len(f.Data))
		sum.Write(f.Data)
	}
	g.ID = hex.EncodeToString(sum.Sum(nil))[:len(unnamed)]
	for i := range r.files {
		g.Files[i].Data = bytes.ReplaceAll(g.Files[i].Data, []byte(unnamed), []byte(g.ID))
	}
	return g, nil
}

// checked renders a file and compares it with what was meant. Both sides are
// parsed at the same time: that is where the time goes.
func (r *Renderer) checked(file string, m model) ([]byte, error) {
	var text []byte
	var is, want crossplane.Directives
	meant := &placeholders{}
	var g errgroup.Group
	g.Go(func() (err error) {
		if text, err = r.execute(file, m, plain{}); err == nil {
			is, err = parse(file, text)
		}
		return err
	})
	g.Go(func() error {
		harmless, err := r.execute(file, m, meant)
		if err == nil {
			want, err = parse(file, harmless)
		}
		return err
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return text, sameBlock(file, is, want, meant)
}

// user adds the user's own files, in a fixed order.
func (r *Renderer) user(g *Generation, files []File) error {
	if r.config.Include {
		return nil
	}
	files = slices.Clone(files)
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	for _, f := range files {
		if !userFilePattern.MatchString(f.Name) {
			return fmt.Errorf("user file: want a name of A-Z, a-z, 0-9 and ._- that ends in .conf")
		}
	}
	g.Files = append(g.Files, files...)
	return nil
}

func (r *Renderer) execute(file string, m model, w writer) ([]byte, error) {
	t, err := parseTemplate(file, r.texts[file], w)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, m); err != nil {
		return nil, fmt.Errorf("render: %w", err)
	}
	return b.Bytes(), nil
}

func primaries(services []upstream.Service) []placement.LinkID {
	var out []placement.LinkID
	for _, s := range services {
		out = append(out, s.Primaries()...)
	}
	slices.SortFunc(out, upstream.CompareLinks)
	return slices.Compact(out)
}

// printable shortens a name that failed its check for an error message.
func printable(name string) string {
	if placement.CheckName(name) != nil {
		return "with an invalid name"
	}
	return name
}
