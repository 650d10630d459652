// Command probe says, from inside a container, what a container has. It is all
// that the image of the engine's tests holds.
package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		os.Exit(64)
	}
	arg := func(i int) string {
		if i+1 < len(os.Args) {
			return os.Args[i+1]
		}
		return ""
	}
	number := func(i int) int {
		n, err := strconv.Atoi(arg(i))
		check(err)
		return n
	}
	switch os.Args[1] {
	case "env":
		env := os.Environ()
		slices.Sort(env)
		fmt.Println(strings.Join(env, "\n"))
	case "cat":
		data, err := os.ReadFile(arg(1))
		check(err)
		os.Stdout.Write(data)
	case "exit":
		os.Exit(number(1))
	case "open": // open PATH...: each path, and how opening it ended
		for _, path := range os.Args[2:] {
			fmt.Println(path, open(path))
		}
	case "mknod": // mknod MAJOR MINOR: make the node here, then open it
		path := "/node"
		fmt.Println("mknod", name(syscall.Mknod(path, syscall.S_IFCHR|0o666, number(1)<<8|number(2))))
		fmt.Println("open", open(path))
	case "write": // write PATH: how writing there ended
		fmt.Println(name(os.WriteFile(arg(1), []byte("written\n"), 0o644)))
	case "exists": // a health check
		if _, err := os.Stat(arg(1)); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	case "wait": // until TERM; then say so and end with 0
		fmt.Println("waiting")
		fmt.Fprintln(os.Stderr, "and on stderr")
		term := make(chan os.Signal, 1)
		signal.Notify(term, syscall.SIGTERM)
		<-term
		fmt.Println("terminated")
	case "touch-at-usr1": // touch-at-usr1 PATH: make the file at SIGUSR1, take it away at SIGUSR2
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
		fmt.Println("ready")
		for s := range signals {
			if s == syscall.SIGUSR1 {
				check(os.WriteFile(arg(1), nil, 0o644))
			} else {
				check(os.Remove(arg(1)))
			}
		}
	case "stubborn": // ignore TERM
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("ready")
		time.Sleep(time.Hour)
	case "eat": // eat MiB, and keep them
		var kept [][]byte
		for range number(1) {
			b := make([]byte, 1<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			kept = append(kept, b)
		}
		fmt.Println("ate", len(kept))
		time.Sleep(time.Hour)
	case "serve":
		check(http.ListenAndServe(":"+arg(1), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello\n") })))
	case "self":
		self()
	default:
		os.Exit(64)
	}
}

func self() {
	hostname, _ := os.Hostname()
	wd, _ := os.Getwd()
	fmt.Println("uid", os.Getuid())
	fmt.Println("pid", os.Getpid())
	fmt.Println("hostname", hostname)
	fmt.Println("cwd", wd)
	// Of the init process: Go raises its own.
	limits, err := os.ReadFile("/proc/1/limits")
	check(err)
	for line := range strings.Lines(string(limits)) {
		if rest, ok := strings.CutPrefix(line, "Max open files"); ok {
			fmt.Println("nofile", strings.Join(strings.Fields(rest)[:2], " "))
		}
	}
	for _, dir := range []string{"/dev/shm", "/scratch"} {
		var fs syscall.Statfs_t
		if syscall.Statfs(dir, &fs) == nil {
			fmt.Println(dir, fs.Blocks*uint64(fs.Bsize))
		}
	}
	status, err := os.ReadFile("/proc/self/status")
	check(err)
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "CapEff:") || strings.HasPrefix(line, "NoNewPrivs:") {
			fmt.Println(strings.Join(strings.Fields(line), " "))
		}
	}
	comm, err := os.ReadFile("/proc/1/comm")
	check(err)
	fmt.Print("init ", string(comm))
	somaxconn, _ := os.ReadFile("/proc/sys/net/core/somaxconn")
	fmt.Print("somaxconn ", string(somaxconn))
	devices, _ := filepath.Glob("/dev/nvidia*")
	fmt.Println("devices", devices)
}

func open(path string) string {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		f.Close()
	}
	return name(err)
}

func name(err error) string {
	for errno, n := range map[syscall.Errno]string{syscall.EPERM: "EPERM", syscall.EACCES: "EACCES", syscall.ENXIO: "ENXIO", syscall.ENOENT: "ENOENT", syscall.EROFS: "EROFS"} {
		if errors.Is(err, errno) {
			return n
		}
	}
	if err != nil {
		return err.Error()
	}
	return "ok"
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
