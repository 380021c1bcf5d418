// Command testapp is the application that the end-to-end tests run in their
// containers: HTTP/1.1 and cleartext HTTP/2 on one port, a TCP echo on
// another, endpoints for every way an application can answer or fail, and a
// record of every request on the node's disk.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/opfield/availability/e2e/delivery"
)

func main() {
	log.SetFlags(log.LstdFlags | log.Lmicroseconds)
	command := "serve"
	args := os.Args[1:]
	if len(args) > 0 && args[0][0] != '-' {
		command, args = args[0], args[1:]
	}
	var err error
	switch command {
	case "serve":
		err = serve(args)
	case "check":
		err = check(args)
	case "burn":
		err = burn(args)
	default:
		err = fmt.Errorf("unknown command %q: use serve, check or burn", command)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(args []string) error {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	name := flags.String("name", "", "what X-Served-By says")
	listen := flags.String("listen", ":8080", "HTTP address")
	echo := flags.String("tcp", ":9000", "TCP echo address")
	record := flags.String("record", "", "file that records every request")
	unhealthy := flags.String("unhealthy", "/record/unhealthy", "while this file exists, /healthz answers 503")
	startDelay := flags.Duration("start-delay", 0, "wait before listening")
	drain := flags.Duration("drain", 0, "go on serving for this long after SIGTERM, then finish what runs")
	drainLimit := flags.Duration("drain-limit", 30*time.Second, "how long running requests may take after that")
	ignoreTerm := flags.Bool("ignore-term", false, "do nothing on SIGTERM")
	idle := flags.Duration("idle-timeout", time.Minute, "close idle kept-alive connections after this long")
	if err := flags.Parse(args); err != nil {
		return err
	}
	recorder, err := delivery.Open(*record)
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	time.Sleep(*startDelay)

	ln, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	echoLn, err := net.Listen("tcp", *echo)
	if err != nil {
		return err
	}
	go serveEcho(echoLn)
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	app := &app{name: *name, recorder: recorder, unhealthyFile: *unhealthy}
	server := &http.Server{Handler: app.handler(), IdleTimeout: *idle, Protocols: protocols}
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	log.Printf("%s serves on %s", *name, ln.Addr())
	for {
		select {
		case err := <-served:
			return err
		case sig := <-signals:
			log.Printf("%s received %v", *name, sig)
			if *ignoreTerm {
				continue
			}
		}
		time.Sleep(*drain)
		ctx, cancel := context.WithTimeout(context.Background(), *drainLimit)
		defer cancel()
		err := server.Shutdown(ctx)
		log.Printf("%s ends: %v", *name, err)
		return err
	}
}

// serveEcho sends back what it receives and passes a half-close on.
func serveEcho(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			log.Printf("tcp echo ended: %v", err)
			return
		}
		go func() {
			defer conn.Close()
			if _, err := io.Copy(conn, conn); err == nil {
				_ = conn.(*net.TCPConn).CloseWrite() // the peer may be gone
				_, _ = io.Copy(io.Discard, conn)
			}
		}()
	}
}

// check is the health check of the image.
func check(args []string) error {
	url := "http://127.0.0.1:8080/healthz"
	if len(args) > 0 {
		url = args[0]
	}
	client := http.Client{Timeout: time.Second}
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// burn keeps CPUs busy until it is killed or the time is over.
func burn(args []string) error {
	flags := flag.NewFlagSet("burn", flag.ExitOnError)
	cpus := flags.Int("cpus", 1, "how many")
	limit := flags.Duration("for", time.Minute, "how long")
	if err := flags.Parse(args); err != nil {
		return err
	}
	end := time.Now().Add(*limit)
	done := make(chan uint64, *cpus)
	for range *cpus {
		go func() {
			var n uint64
			for time.Now().Before(end) {
				n++
			}
			done <- n
		}()
	}
	for range *cpus {
		<-done
	}
	return nil
}
