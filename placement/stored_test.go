package placement_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement"
	"github.com/berth-gpu/berth/placement/fleet"
)

// TestHalfARequest: a crash between two transactions of one request; the same request
// again gives the tasks that were stored, and those that were not.
func TestHalfARequest(t *testing.T) {
	t.Parallel()
	s := settings(t)
	r := serve(t, s)
	in := api.RunTask{Definition: shared("job", 1000), Count: 5, ClientToken: "once"}
	first := run(t, r.client, in)
	r.stop(t)
	write(t, s, fleet.KindTask, first[1], nil)
	write(t, s, fleet.KindTask, first[4], nil)
	r = serve(t, s)
	again := run(t, r.client, in)
	for i, id := range first {
		if stored := i != 1 && i != 4; slices.Contains(again, id) != stored {
			t.Errorf("%v, and again %v", first, again)
		}
	}
	if len(again) != 5 || len(tasks(t, r.client)) != 5 {
		t.Errorf("%v, and again %v", first, again)
	}
}

// TestDamagedRecord: one record that cannot be read is set aside, once, with a word;
// the others are there.
func TestDamagedRecord(t *testing.T) {
	t.Parallel()
	s := settings(t)
	r := serve(t, s)
	ids := run(t, r.client, api.RunTask{Definition: shared("job", 1000), Count: 2})
	r.stop(t)
	write(t, s, fleet.KindTask, ids[0], map[string]any{"id": "another"})
	write(t, s, fleet.KindReplacement, "r", 5)
	write(t, s, "dragon", "d", 5)
	for range 2 {
		r = serve(t, s)
		if got := tasks(t, r.client); len(got) != 1 || got[0].ID != ids[1] {
			t.Errorf("%+v", got)
		}
		said := []string{}
		until(t, "the events are stored", func() bool {
			said = said[:0]
			for _, e := range events(t, r.client) {
				if e.Kind == "server" {
					said = append(said, e.Subject+": "+e.Says)
				}
			}
			return len(said) == 3
		})
		for i, want := range []string{"dragon d: a damaged record was set aside: ", "replacement r: a damaged record was set aside: ", "task " + ids[0] + ": a damaged record was set aside: "} {
			if !strings.HasPrefix(said[i], want) {
				t.Errorf("%q, want %q", said[i], want)
			}
		}
		r.stop(t)
	}
}

// TestCannotServe: what keeps a server from serving ends it, with what to see to.
func TestCannotServe(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for name, c := range map[string]struct {
		socket, listen, says string
	}{
		"the operators' socket": {"/proc/nothing/s.sock", "", "/proc/nothing"},
		"the agents' port":      {"", taken.Addr().String(), "agents.listen: listen tcp " + taken.Addr().String() + ": bind: address already in use"},
	} {
		t.Run(name, func(t *testing.T) {
			s := settings(t)
			if c.socket != "" {
				s.Socket = c.socket
			}
			if c.listen != "" {
				s.Agents.Listen = c.listen
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			server, err := placement.Open(ctx, s, nil, "test", logger())
			if err != nil {
				t.Fatal(err)
			}
			if err := server.Run(ctx); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
			if ctx.Err() != nil {
				t.Error("it did not end by itself")
			}
		})
	}
	s := settings(t)
	r := serve(t, s)
	if info, err := os.Stat(s.Socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the operators' socket: %v %v", info, err)
	}
	if info, err := os.Stat(strings.TrimPrefix(s.Agents.Listen, "unix:")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the agents' socket: %v %v", info, err)
	}
	other := *s // another server on the same folder
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if _, err := placement.Open(ctx, &other, nil, "test", logger()); err == nil {
		t.Error("two servers on one folder")
	} else if !strings.Contains(err.Error(), s.DataDir) {
		t.Error(err)
	}
	var about api.Server
	if err := r.try("GET", api.PathServer, nil, &about); err != nil || !about.Leader || about.Cluster != "test" || about.Version != "test" || about.Dir != s.DataDir || about.Term == 0 {
		t.Error(fmt.Sprintf("%+v", about), err)
	}
}
