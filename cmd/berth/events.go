package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

func (a *app) eventsCommand() *cobra.Command {
	var follow bool
	var after uint64
	cmd := &cobra.Command{
		Use:   "events [-f] [--after SEQ]",
		Short: "Print what has happened, the oldest first",
		Long: `events prints what has happened in the fleet, a line each; with -o json an object a line,
whose seq is what --after takes. With -f it goes on until Ctrl-C, over restarts of the
server too, without losing or repeating an event.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.events(cmd.Context(), follow, after)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what happens from now on")
	cmd.Flags().Uint64Var(&after, "after", 0, "only events with a greater sequence number")
	return cmd
}

// events prints the events after seq. Following, it asks again for the rest when the
// connection ends, and gives up when nobody has answered for unansweredFor.
func (a *app) events(ctx context.Context, follow bool, seq uint64) error {
	c := a.client()
	heard := time.Now()
	connected := false
	for {
		before := seq
		err := a.eventStream(ctx, c, follow, &seq)
		var u *unanswered
		switch {
		case follow && ctx.Err() != nil:
			return nil // Ctrl-C is how following ends
		case err == nil && !follow:
			return nil
		case err == nil || seq != before:
			connected, heard = true, time.Now()
		case !errors.As(err, &u) || !connected || time.Since(heard) > unansweredFor:
			return err
		}
		if !follow {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(a.poll):
		}
	}
}

// eventStream prints the events of one answer and leaves in seq the last one's number.
func (a *app) eventStream(ctx context.Context, c *client, follow bool, seq *uint64) error {
	query := url.Values{}
	if *seq > 0 {
		query.Set("after", strconv.FormatUint(*seq, 10))
	}
	if follow {
		query.Set("follow", "1")
	}
	body, err := c.open(ctx, http.MethodGet, api.PathEvents, query, nil)
	if err != nil {
		return err
	}
	defer body.Close()
	lines := bufio.NewReader(body)
	for {
		line, err := lines.ReadString('\n')
		if err == io.EOF && line != "" {
			err = io.ErrUnexpectedEOF // the server ended within an event
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return c.explain(err)
		}
		var e api.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			return fmt.Errorf("the %s at %s sent an event that is none: %v", c.who(), c.socket, err)
		}
		*seq = max(*seq, e.Seq)
		if a.json() {
			_, err = a.out.Write([]byte(line))
		} else {
			_, err = fmt.Fprintln(a.out, a.eventLine(e))
		}
		if err != nil {
			return err
		}
	}
}

func (a *app) eventLine(e api.Event) string {
	return strings.TrimRight(fmt.Sprintf("%s  %-11s  %-10s  %s", e.At.In(a.now().Location()).Format("2006-01-02 15:04:05"), e.Kind, subject(e), e.Says), " ")
}

func subject(e api.Event) string {
	if isID(e.Subject) {
		return shortID(e.Subject)
	}
	return e.Subject
}
