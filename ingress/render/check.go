package render

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	crossplane "github.com/nginxinc/nginx-go-crossplane"
)

// ErrNotMeant is returned when a rendered file says something else than the
// same file with harmless values: a value broke out of its place.
var ErrNotMeant = errors.New("rendered configuration is not what was meant")

// plain writes a value as it is. The quoting stands in the template; what
// would break it is refused here as well as by the allow-lists.
type plain struct{}

var unsafe = regexp.MustCompile(`[^A-Za-z0-9._~/*\[\]-]`)

func (plain) value(text string) (string, error) {
	if unsafe.MatchString(text) {
		return "", fmt.Errorf("%w: a value has a character that no value may have", ErrNotMeant)
	}
	return text, nil
}

// placeholders writes a unique harmless word for every value and remembers
// what it stands for.
type placeholders struct{ values []string }

var placeholder = regexp.MustCompile(`opfvalue[0-9]{9}x`)

func (p *placeholders) value(text string) (string, error) {
	p.values = append(p.values, text)
	return fmt.Sprintf("opfvalue%09dx", len(p.values)-1), nil
}

func (p *placeholders) restore(text string) string {
	if !strings.Contains(text, "opfvalue") {
		return text
	}
	return placeholder.ReplaceAllStringFunc(text, func(word string) string {
		n, err := strconv.Atoi(word[len("opfvalue") : len(word)-1])
		if err != nil || n >= len(p.values) {
			return word
		}
		return p.values[n]
	})
}

// sameBlock reports the first difference between the real tree and the
// harmless one with its values put back.
func sameBlock(file string, is, want crossplane.Directives, meant *placeholders) error {
	if len(is) != len(want) {
		return fmt.Errorf("%w: %s: %d directives in a block, %d were meant", ErrNotMeant, file, len(is), len(want))
	}
	for i := range is {
		a, b := is[i], want[i]
		same := a.Directive == meant.restore(b.Directive) && len(a.Args) == len(b.Args) && (a.Comment == nil) == (b.Comment == nil)
		for j := 0; same && j < len(a.Args); j++ {
			same = a.Args[j] == meant.restore(b.Args[j])
		}
		if !same {
			return fmt.Errorf("%w: %s line %d", ErrNotMeant, file, a.Line)
		}
		if err := sameBlock(file, a.Block, b.Block, meant); err != nil {
			return err
		}
	}
	return nil
}

// parse reads one file strictly, in the context that it is included in.
func parse(file string, text []byte) (crossplane.Directives, error) {
	switch file {
	case HTTPFile:
		text = wrap("events {} http {\n", text)
	case StreamFile:
		text = wrap("events {} stream {\n", text)
	}
	payload, err := crossplane.Parse(file, &crossplane.ParseOptions{
		SingleFile:               true,
		ErrorOnUnknownDirectives: true,
		DirectiveSources:         []crossplane.MatchFunc{crossplane.MatchOss126},
		Open:                     func(string) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(text)), nil },
	})
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", file, err)
	}
	if len(payload.Errors) > 0 {
		return nil, fmt.Errorf("parse %s: %w", file, payload.Errors[0].Error)
	}
	if len(payload.Config) != 1 {
		return nil, fmt.Errorf("parse %s: %d files instead of one", file, len(payload.Config))
	}
	return payload.Config[0].Parsed, nil
}

func wrap(head string, text []byte) []byte {
	return append(append([]byte(head), text...), "\n}\n"...)
}
