package engine

import (
	"context"
	"io"
	"strconv"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"
)

// LogOptions say which lines of a container's output are wanted.
type LogOptions struct {
	Follow     bool
	Tail       int // the last lines only; 0: all
	Since      time.Time
	Timestamps bool
}

// Logs is what the container wrote, stdout and stderr in one, as plain text.
// It ends with the log, or with the container when following. The reader must
// be closed; that ends the stream at once.
func (e *Engine) Logs(ctx context.Context, id string, o LogOptions) (io.ReadCloser, error) {
	var tty bool
	err := call(ctx, ErrCannotInspect, inspectLimit, "inspected", func(ctx context.Context) error {
		r, err := e.docker.ContainerInspect(ctx, id)
		if err == nil {
			tty = r.Config.Tty
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	options := container.LogsOptions{ShowStdout: true, ShowStderr: true, Follow: o.Follow, Timestamps: o.Timestamps}
	if o.Tail > 0 {
		options.Tail = strconv.Itoa(o.Tail)
	}
	if !o.Since.IsZero() {
		options.Since = o.Since.Format(time.RFC3339Nano)
	}
	// The stream lives as long as the reader; only its beginning has a limit.
	streaming, cancel := context.WithCancel(ctx)
	var body io.ReadCloser
	err = call(ctx, ErrCannotInspect, inspectLimit, "read", func(bounded context.Context) (err error) {
		stop := context.AfterFunc(bounded, cancel)
		defer stop()
		body, err = e.docker.ContainerLogs(streaming, id, options)
		return err
	})
	if err != nil {
		cancel()
		return nil, err
	}
	l := &logStream{cancel: cancel, body: body, Reader: body, done: make(chan struct{})}
	if tty { // one raw stream, without Docker's headers
		close(l.done)
		return l, nil
	}
	plain, w := io.Pipe()
	l.Reader, l.plain = plain, plain
	go func() {
		defer close(l.done)
		_, err := stdcopy.StdCopy(w, w, body)
		w.CloseWithError(err) // io.EOF for nil
	}()
	return l, nil
}

type logStream struct {
	io.Reader
	cancel context.CancelFunc
	body   io.Closer
	plain  *io.PipeReader
	done   chan struct{} // the demultiplexer has ended
}

func (l *logStream) Close() error {
	l.cancel()
	if l.plain != nil {
		l.plain.Close()
	}
	err := l.body.Close()
	<-l.done
	return err
}
