package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

type completionCmd struct {
	Shell string `arg:"" help:"bash." enum:"bash"`
}

// Run prints the script; it is made from the command line itself.
func (completionCmd) Run(s *session, k *kong.Kong) error {
	_, err := fmt.Fprint(s.out, bashCompletion(k.Model.Node))
	return err
}

// bashCompletion names a command by its path: "", "route", "route add".
func bashCompletion(root *kong.Node) string {
	var words, values strings.Builder
	var walk func(n *kong.Node, path string)
	walk = func(n *kong.Node, path string) {
		var next []string
		for _, c := range n.Children {
			if c.Type == kong.CommandNode && !c.Hidden {
				next = append(next, c.Name)
				walk(c, strings.TrimSpace(path+" "+c.Name))
			}
		}
		for _, p := range n.Positional {
			if p.Enum != "" {
				next = append(next, p.EnumSlice()...)
			}
		}
		for _, group := range n.AllFlags(true) {
			for _, f := range group {
				next = append(next, "--"+f.Name)
				if v := flagValues(f); v != "" {
					fmt.Fprintf(&values, "    %q) %s ;;\n", path+" --"+f.Name, v)
					if f.Short != 0 {
						fmt.Fprintf(&values, "    %q) %s ;;\n", path+" -"+string(f.Short), v)
					}
				}
			}
		}
		slices.Sort(next)
		fmt.Fprintf(&words, "    %q) echo %q ;;\n", path, strings.Join(slices.Compact(next), " "))
	}
	walk(root, "")
	return fmt.Sprintf(bashScript, words.String(), values.String())
}

// flagValues is the bash command that completes the flag's value; empty if the
// flag takes none.
func flagValues(f *kong.Flag) string {
	switch {
	case f.IsBool(), f.IsCounter(), f.Name == "help":
		return ""
	case f.Enum != "":
		return `COMPREPLY=($(compgen -W "` + strings.Join(f.EnumSlice(), " ") + `" -- "$cur")); return`
	case f.Tag.Type == "path", f.Tag.Type == "existingfile", f.Name == "config", strings.HasSuffix(f.Name, "-file"):
		return `COMPREPLY=($(compgen -f -- "$cur")); return`
	default:
		return "return"
	}
}

const bashScript = `# bash completion of opfield: source <(opfield completion bash)
_opfield_words() {
  case "$1" in
%s    *) return 1 ;;
  esac
}

_opfield() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} path="" next i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    next="${path:+$path }${COMP_WORDS[i]}"
    if [[ ${COMP_WORDS[i]} != -* ]] && _opfield_words "$next" >/dev/null; then path=$next; fi
  done
  case "$path $prev" in
%s  esac
  COMPREPLY=($(compgen -W "$(_opfield_words "$path")" -- "$cur"))
}
complete -o filenames -F _opfield opfield
`
