package availability_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	slash "path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/opfield/availability/"

// table says which folders of the module a folder may import. The longest
// row that begins a package's path counts; a folder may always import what is
// below its own row. "*" is everything.
func table() map[string][]string {
	return map[string][]string{
		"placement":       {},
		"templates":       {},
		"upstream":        {"placement"},
		"policy":          {"placement"},
		"securelink":      {"placement"},
		"identity":        {"placement"},
		"bus":             {"placement", "identity"},
		"policy/engine":   {"placement", "policy", "bus"},
		"policy/simulate": {"placement", "policy"},
		"relay":           {"placement", "securelink", "identity", "bus"},
		"ingress":         {"placement", "upstream", "templates", "securelink", "identity", "bus"},
		"node":            {"placement", "securelink", "identity", "bus"},
		"api":             {"placement", "policy", "policy/engine", "bus", "identity", "upstream"},
		"cmd":             {"*"},
		"e2e":             {"placement"},
		"examples":        {"placement", "identity", "bus"},
	}
}

// pure folders compute and do nothing else; their sub-folders have rows of
// their own.
func pure() []string { return []string{"placement", "upstream", "policy", "node/discovery"} }

// impure are the imports and calls that a pure folder must not have.
func impure() (imports, calls []string) {
	return []string{"net", "net/http", "os", "os/exec", "context", "log", "log/slog", "math/rand", "math/rand/v2", "crypto/rand", "syscall"},
		[]string{"time.Now", "time.Since", "time.Until", "time.Sleep", "time.After", "time.AfterFunc", "time.NewTimer", "time.NewTicker", "time.Tick"}
}

// source is one Go file.
type source struct {
	path  string // "node/agent.go"
	dir   string // "node"
	test  bool
	file  *ast.File
	fset  *token.FileSet
	lines int
}

func sources(t *testing.T) []source {
	t.Helper()
	var all []source
	fset := token.NewFileSet()
	err := filepath.WalkDir(".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && name != "." && (strings.HasPrefix(entry.Name(), ".") || entry.Name() == "testdata" || entry.Name() == "node_modules") {
			return fs.SkipDir
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(fset, name, content, parser.ParseComments)
		if err != nil {
			return err
		}
		all = append(all, source{
			path: filepath.ToSlash(name), dir: slash.Dir(filepath.ToSlash(name)), test: strings.HasSuffix(name, "_test.go"),
			file: file, fset: fset, lines: bytes.Count(content, []byte("\n")),
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 10 {
		t.Fatalf("found %d files only: wrong directory?", len(all))
	}
	return all
}

// row returns the longest row of the table that a folder belongs to.
func row(dir string) (string, bool) {
	rows := table()
	for d := dir; d != "." && d != "/"; d = slash.Dir(d) {
		if _, ok := rows[d]; ok {
			return d, true
		}
	}
	return "", false
}

// forTests reports whether a package is one of fakes: "bus/bustest" beside
// "bus", or any "…test" folder.
func forTests(dir string) bool { return strings.HasSuffix(slash.Base(dir), "test") }

func (s source) imports() []string {
	var all []string
	for _, spec := range s.file.Imports {
		if name, err := strconv.Unquote(spec.Path.Value); err == nil {
			all = append(all, name)
		}
	}
	return all
}

func TestArchitecture_Imports(t *testing.T) {
	for _, s := range sources(t) {
		own, known := row(s.dir)
		if !known && s.dir != "." {
			t.Errorf("%s: folder %s has no row in the import table", s.path, s.dir)
			continue
		}
		if s.test || forTests(s.dir) {
			continue
		}
		for _, name := range s.imports() {
			dep, inside := strings.CutPrefix(name, module)
			if !inside {
				continue
			}
			if forTests(dep) && !strings.HasPrefix(s.dir, "e2e") {
				t.Errorf("%s imports %s, which is for tests only", s.path, dep)
			}
			target, _ := row(dep)
			allowed := table()[own]
			if target != own && !slices.Contains(allowed, target) && !slices.Contains(allowed, "*") {
				t.Errorf("%s imports %s: %s may import %v only", s.path, dep, own, allowed)
			}
			if target == "cmd" && own != "cmd" {
				t.Errorf("%s imports %s: nothing imports cmd", s.path, dep)
			}
		}
	}
}

func TestArchitecture_PureFolders(t *testing.T) {
	banned, calls := impure()
	for _, s := range sources(t) {
		if s.test || !slices.Contains(pure(), s.dir) {
			continue
		}
		for _, name := range s.imports() {
			if slices.Contains(banned, name) {
				t.Errorf("%s imports %s, but %s is pure", s.path, name, s.dir)
			}
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s starts a goroutine, but %s is pure", s.fset.Position(n.Pos()), s.dir)
			case *ast.SelectorExpr:
				if slices.Contains(calls, selector(n)) {
					t.Errorf("%s uses %s, but %s is pure", s.fset.Position(n.Pos()), selector(n), s.dir)
				}
			}
			return true
		})
	}
}

// selector returns "package.Name" of an expression of that form.
func selector(e ast.Expr) string {
	if s, ok := e.(*ast.SelectorExpr); ok {
		if x, ok := s.X.(*ast.Ident); ok {
			return x.Name + "." + s.Sel.Name
		}
	}
	return ""
}

func TestArchitecture_Relay_And_Ingress_DoNotLinkDocker(t *testing.T) {
	for _, s := range sources(t) {
		for _, dir := range []string{"relay", "ingress", "securelink", "bus", "identity", "cmd/opfield-relay", "cmd/opfield-ingress", "cmd/internal"} {
			if s.test || s.dir != dir && !strings.HasPrefix(s.dir, dir+"/") {
				continue
			}
			for _, name := range s.imports() {
				if strings.HasPrefix(name, "github.com/docker/") {
					t.Errorf("%s imports %s: only the node agent talks to Docker", s.path, name)
				}
			}
		}
	}
}

func TestArchitecture_PackageDocs(t *testing.T) {
	documented := map[string]bool{}
	for _, s := range sources(t) {
		if !s.test {
			documented[s.dir] = documented[s.dir] || s.file.Doc != nil
		}
	}
	for dir, ok := range documented {
		if !ok {
			t.Errorf("package %s has no doc: say what it owns, what it does not, and who may call it concurrently", dir)
		}
	}
}

func TestArchitecture_FileLength(t *testing.T) {
	for _, s := range sources(t) {
		limit := 500
		if s.test {
			limit = 800
		}
		if s.lines > limit {
			t.Errorf("%s has %d lines, at most %d are allowed: split it by what it owns", s.path, s.lines, limit)
		}
	}
}

func TestArchitecture_NoInitAndNoGlobals(t *testing.T) {
	for _, s := range sources(t) {
		for _, decl := range s.file.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil && d.Name.Name == "init" {
					t.Errorf("%s: no init functions", s.fset.Position(d.Pos()))
				}
			case *ast.GenDecl:
				if d.Tok != token.VAR {
					continue
				}
				for _, spec := range d.Specs {
					if v := spec.(*ast.ValueSpec); !s.mayBeGlobal(d, v) {
						t.Errorf("%s: package variable %s: only errors, embeds and compiled patterns are allowed", s.fset.Position(v.Pos()), v.Names[0].Name)
					}
				}
			}
		}
	}
}

// mayBeGlobal allows errors, embeds, compiled patterns, checks that a type
// implements an interface, the version that the linker sets, and a test's
// -update flag.
func (s source) mayBeGlobal(d *ast.GenDecl, v *ast.ValueSpec) bool {
	for _, doc := range []*ast.CommentGroup{d.Doc, v.Doc} {
		if doc == nil {
			continue
		}
		for _, c := range doc.List {
			if strings.HasPrefix(c.Text, "//go:embed") {
				return true
			}
		}
	}
	if v.Names[0].Name == "_" || v.Names[0].Name == "version" && s.file.Name.Name == "main" {
		return true
	}
	for _, value := range v.Values {
		call, ok := value.(*ast.CallExpr)
		if !ok {
			return false
		}
		switch name := selector(call.Fun); name {
		case "errors.New", "fmt.Errorf", "regexp.MustCompile":
		case "flag.Bool":
			if !s.test {
				return false
			}
		default:
			return false
		}
	}
	return len(v.Values) > 0
}

func TestArchitecture_TestsDoNotSleep(t *testing.T) {
	for _, s := range sources(t) {
		if !s.test || strings.HasPrefix(s.dir, "e2e") {
			continue
		}
		bubble := false
		for _, name := range s.imports() {
			bubble = bubble || name == "testing/synctest"
		}
		if bubble { // a sleep in a bubble takes no time
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if e, ok := n.(*ast.SelectorExpr); ok && selector(e) == "time.Sleep" {
				t.Errorf("%s: a test does not sleep: wait for the condition, or use testing/synctest", s.fset.Position(n.Pos()))
			}
			return true
		})
	}
}

func TestArchitecture_TestsDoNotSkip(t *testing.T) {
	for _, s := range sources(t) {
		if !s.test {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if e, ok := n.(*ast.SelectorExpr); ok && slices.Contains([]string{"t.Skip", "t.Skipf", "t.SkipNow"}, selector(e)) {
				t.Errorf("%s: a test that cannot run fails, it is never skipped into green", s.fset.Position(n.Pos()))
			}
			return true
		})
	}
}

func TestArchitecture_TableHasNoCycle(t *testing.T) {
	rows := table()
	var visit func(name string, trail []string) error
	visit = func(name string, trail []string) error {
		if slices.Contains(trail, name) {
			return fmt.Errorf("cycle %v", append(trail, name))
		}
		for _, dep := range rows[name] {
			if err := visit(dep, append(slices.Clone(trail), name)); err != nil {
				return err
			}
		}
		return nil
	}
	for name := range rows {
		if err := visit(name, nil); err != nil {
			t.Error(err)
		}
	}
}
