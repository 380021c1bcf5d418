// Package delivery is the record the test application keeps of every request
// it received: one line in a file on the node's disk, written before the
// request is worked on. It is read from outside the path that is being broken.
//
// A Recorder may be used concurrently.
package delivery

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"time"
)

// Phase says how far a request came inside the application.
type Phase string

// The phases of a request.
const (
	Received Phase = "received" // its header was read
	Body     Phase = "body"     // its body was read to the end
	Done     Phase = "done"     // the handler returned without an error
)

// Record is one line of the file.
type Record struct {
	ID     string    `json:"id"` // of X-Request-Id, or the id parameter
	Method string    `json:"method"`
	Path   string    `json:"path"`
	Phase  Phase     `json:"phase"`
	At     time.Time `json:"at"`
	Conn   string    `json:"conn"` // the peer's address: one connection
	By     string    `json:"-"`    // "node/container", filled in by the reader
}

// Recorder appends records to a file.
type Recorder struct {
	file *os.File
}

// Open opens the file for appending; an empty path records nothing.
func Open(path string) (*Recorder, error) {
	if path == "" {
		return &Recorder{}, nil
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	return &Recorder{file: file}, nil
}

// Add appends one record with a single write, which no other one can split
// and which outlives a SIGKILL.
func (r *Recorder) Add(rec Record) error {
	if r.file == nil {
		return nil
	}
	line, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	_, err = r.file.Write(append(line, '\n'))
	return err
}

// ReadFile reads the records of a file. A last line without its end is left
// out: it is being written.
func ReadFile(path string) ([]Record, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var records []Record
	for len(b) > 0 {
		line, rest, ended := bytes.Cut(b, []byte("\n"))
		if !ended {
			break
		}
		var rec Record
		if err := json.Unmarshal(line, &rec); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		records, b = append(records, rec), rest
	}
	return records, nil
}
