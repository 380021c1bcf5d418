package main

import (
	"bufio"
	"crypto/sha1" // RFC 6455 section 4.2.2 asks for it
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"
)

// partial sends a response of ?total= bytes by hand, of which ?bytes= are
// really sent (all, if it is left out), and then ends it.
//
// mode: length (Content-Length), chunked, close (ends with the connection).
// end: complete, reset (RST), fin (a plain close), hang (until the peer ends).
// ?seconds= spreads the bytes over time.
func (a *app) partial(w http.ResponseWriter, r *http.Request, mode, end string) {
	total := number(r, "total", 20000)
	sent := min(number(r, "bytes", total), total)
	seconds := number(r, "seconds", 0)
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer conn.Close()
	head := "HTTP/1.1 200 OK\r\nX-Served-By: " + a.name + "\r\nX-Echo-Id: " + r.URL.Query().Get("rid") + "\r\n"
	switch mode {
	case "length":
		head += fmt.Sprintf("Content-Length: %d\r\n\r\n", total)
	case "chunked":
		head += "Transfer-Encoding: chunked\r\n\r\n"
	default:
		mode = "close"
		head += "Connection: close\r\n\r\n"
	}
	if _, err := io.WriteString(conn, head); err != nil {
		return
	}
	const pieces = 20
	for i := range pieces {
		piece := make([]byte, sent*(i+1)/pieces-sent*i/pieces)
		fill(piece, sent*i/pieces)
		if len(piece) == 0 {
			continue
		}
		if mode == "chunked" {
			piece = fmt.Appendf(nil, "%x\r\n%s\r\n", len(piece), piece)
		}
		if _, err := conn.Write(piece); err != nil {
			return
		}
		time.Sleep(time.Duration(seconds) * time.Second / pieces)
	}
	switch end {
	case "reset":
		time.Sleep(50 * time.Millisecond) // let what was sent arrive: RST overtakes it
		if err := conn.(*net.TCPConn).SetLinger(0); err != nil {
			log.Printf("reset: %v", err)
		}
	case "hang":
		_, _ = io.Copy(io.Discard, buffered)
	case "fin":
	default:
		if mode == "chunked" {
			_, _ = io.WriteString(conn, "0\r\n\r\n")
		}
	}
}

// webSocket echoes the messages of a WebSocket (RFC 6455) until it is closed.
func (a *app) webSocket(w http.ResponseWriter, r *http.Request) {
	const guid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
	key := r.Header.Get("Sec-WebSocket-Key")
	if key == "" {
		http.Error(w, "want a WebSocket handshake", http.StatusBadRequest)
		return
	}
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer conn.Close()
	sum := sha1.Sum([]byte(key + guid))
	fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Served-By: %s\r\nSec-WebSocket-Accept: %s\r\n\r\n",
		a.name, base64.StdEncoding.EncodeToString(sum[:]))
	for {
		op, payload, err := readFrame(buffered.Reader)
		if err != nil {
			return
		}
		if op == 9 { // ping
			op = 10
		}
		if err := writeFrame(conn, op, payload); err != nil || op == 8 {
			return
		}
	}
}

// readFrame reads one masked frame (RFC 6455 section 5.2).
func readFrame(r *bufio.Reader) (op byte, payload []byte, err error) {
	var head [2]byte
	if _, err = io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	size := uint64(head[1] & 0x7f)
	switch size {
	case 126:
		var b [2]byte
		_, err = io.ReadFull(r, b[:])
		size = uint64(binary.BigEndian.Uint16(b[:]))
	case 127:
		var b [8]byte
		_, err = io.ReadFull(r, b[:])
		size = binary.BigEndian.Uint64(b[:])
	}
	if err == nil && size > 1<<20 {
		err = fmt.Errorf("frame of %d bytes", size)
	}
	if err != nil {
		return 0, nil, err
	}
	var mask [4]byte
	if head[1]&0x80 != 0 {
		if _, err = io.ReadFull(r, mask[:]); err != nil {
			return 0, nil, err
		}
	}
	payload = make([]byte, size)
	_, err = io.ReadFull(r, payload)
	for i := range payload {
		payload[i] ^= mask[i&3]
	}
	return head[0] & 0x0f, payload, err
}

// writeFrame writes one whole unmasked message.
func writeFrame(w io.Writer, op byte, payload []byte) error {
	frame := []byte{0x80 | op}
	switch n := len(payload); {
	case n < 126:
		frame = append(frame, byte(n))
	case n < 1<<16:
		frame = binary.BigEndian.AppendUint16(append(frame, 126), uint16(n))
	default:
		frame = binary.BigEndian.AppendUint64(append(frame, 127), uint64(n))
	}
	_, err := w.Write(append(frame, payload...))
	return err
}
