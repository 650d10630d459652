package main_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/berth-gpu/berth/api"
)

// A machine without a GPU still runs tasks; these are the rules of the folder.
func TestFolder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.set("gpu.nvmlLibrary", filepath.Join(r.dir, "no-such-library.so.1"))
	r.want("b-sleeps", plain("sleep", "1h"))
	r.want("a-exits", plain("exit", "7"))
	r.wantText("c-bad", `{"family":"x","containerDefinitions":[{"name":"m","image":"i","memory":"64"}]}`)
	r.start()

	t.Run("a file is a task", func(t *testing.T) {
		r.until("the sleeper runs", func() bool { return r.running("b-sleeps") })
		if c := r.container("b-sleeps"); c.Labels.Instance != r.instance || c.Labels.Generation == 0 {
			t.Errorf("labels: %+v", c.Labels)
		}
		if env := r.exec("b-sleeps", "env"); !strings.Contains(env, "NVIDIA_VISIBLE_DEVICES=void") {
			t.Errorf("a container without a GPU must see none: %s", env)
		}
	})
	t.Run("one that ends by itself stays stopped, with its exit code", func(t *testing.T) {
		r.until("it has ended", func() bool { return r.stopped("a-exits") })
		got := r.task("a-exits")
		if code := got.Containers[0].ExitCode; code == nil || *code != 7 || got.StopCode != "EssentialContainerExited" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a bad file is named with its problem and hides no other", func(t *testing.T) {
		r.until("the problem is shown", func() bool { return len(r.inst().Problems) == 1 })
		p := r.inst().Problems[0]
		if p.Name != "c-bad" || !strings.Contains(strings.Join(p.Problems, "\n"), "containerDefinitions[0].memory") {
			t.Errorf("got %+v", p)
		}
	})
	t.Run("changing the file replaces the task", func(t *testing.T) {
		old := r.task("b-sleeps")
		r.want("b-sleeps", plain("sleep", "2h"))
		r.until("a new generation runs", func() bool {
			n := r.task("b-sleeps")
			return n.Generation > old.Generation && n.LastStatus == api.StatusRunning
		})
		for _, c := range r.containers() {
			if c.Labels.Task == old.ID && c.Alive() {
				t.Errorf("the old one still runs beside it: %s", c.Name)
			}
		}
	})
	t.Run("an operator's stop is kept", func(t *testing.T) {
		id := r.task("b-sleeps").ID
		if _, err := r.ask("POST", "/v1/tasks/"+id[:6]+"/stop", nil); err != nil {
			t.Fatal(err)
		}
		r.until("it has stopped", func() bool { return r.stopped("b-sleeps") })
		if got := r.task("b-sleeps"); got.ID != id || got.StopCode != "UserInitiated" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("removing the file forgets the task, and it may come again", func(t *testing.T) {
		r.drop("b-sleeps")
		r.until("it is forgotten", func() bool { return r.task("b-sleeps").ID == "" })
		r.want("b-sleeps", plain("sleep", "3h"))
		r.until("it runs again", func() bool { return r.running("b-sleeps") })
		r.drop("b-sleeps")
		r.until("a running one is stopped and forgotten", func() bool { return r.task("b-sleeps").ID == "" })
		if n := len(r.containers()); n != 1 { // a-exits, kept for its logs
			t.Errorf("%d containers are left, want 1", n)
		}
	})
	t.Run("a restart of the agent restarts nothing", func(t *testing.T) {
		r.want("d-stays", plain("sleep", "1h"))
		r.until("it runs", func() bool { return r.running("d-stays") })
		before := r.container("d-stays")
		r.signal(syscall.SIGKILL)
		r.start()
		r.until("it is adopted", func() bool { return r.running("d-stays") })
		if after := r.container("d-stays"); after.ID != before.ID || !after.StartedAt.Equal(before.StartedAt) {
			t.Errorf("was %+v\nis  %+v", before, after)
		}
		if got := r.task("a-exits"); got.LastStatus != api.StatusStopped || *got.Containers[0].ExitCode != 7 {
			t.Errorf("the ended one is now %+v", got)
		}
	})
	t.Run("purge leaves nothing", func(t *testing.T) {
		if err := r.signal(syscall.SIGTERM); err != nil {
			t.Errorf("SIGTERM: %v", err)
		}
		if !alive(r, 1) {
			t.Error("SIGTERM to the agent must not end its tasks")
		}
		if out, err := r.run("purge"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if left := r.containers(); len(left) != 0 {
			t.Errorf("containers left: %v", left)
		}
		for _, dir := range []string{"run", "state", "log"} {
			if _, err := os.Stat(filepath.Join(r.dir, dir)); err == nil {
				t.Errorf("folder %s is left", dir)
			}
		}
	})
}

// alive says whether n containers of the rig run.
func alive(r *rig, n int) bool {
	for _, c := range r.containers() {
		if c.Alive() {
			n--
		}
	}
	return n == 0
}
