// Package scripts holds the tests of this folder's shell scripts.
package scripts

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// function runs one of setup's functions, with its cache folder aside.
func function(t *testing.T, script string, args ...string) string {
	t.Helper()
	cmd := exec.Command("bash", append([]string{"-c", ". ./setup; " + script, "setup"}, args...)...)
	cmd.Env = append(os.Environ(), "SETUP_TEST=1", "XDG_CACHE_HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

// Which of a machine's apt sources are its distribution's archive.
func TestArchiveSources(t *testing.T) {
	const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	for _, tc := range []struct {
		name, file, text string
		want             []string
	}{
		{"deb822, two stanzas", "sources.list.d/debian.sources", `Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/of-the-machine.gpg

Types: deb deb-src
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main contrib
`, []string{
			"deb [signed-by=/usr/share/keyrings/of-the-machine.gpg] http://mirror.example/debian bookworm main non-free",
			"deb [signed-by=/usr/share/keyrings/of-the-machine.gpg] http://mirror.example/debian bookworm-updates main non-free",
			"deb [signed-by=" + keyring + "] http://mirror.example/debian-security bookworm-security main non-free",
		}},
		{"one-line entries", "sources.list", `# deb http://old.example/debian bookworm main
deb http://mirror.example/debian/ bookworm main contrib # the mirror
deb-src http://mirror.example/debian/ bookworm main
deb [arch=amd64 signed-by=/etc/key.gpg] http://mirror.example/debian/ bookworm-updates main
deb [trusted=yes] http://lan.example/debian bookworm main
deb cdrom:[Debian]/ bookworm main
`, []string{
			"deb [signed-by=" + keyring + "] http://mirror.example/debian/ bookworm main non-free",
			"deb [arch=amd64 signed-by=/etc/key.gpg] http://mirror.example/debian/ bookworm-updates main non-free",
			"deb [trusted=yes] http://lan.example/debian bookworm main non-free",
		}},
		{"a key inside the stanza", "sources.list.d/debian.sources", `Types: deb
URIs: http://mirror.example/debian
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEYCQjIxYJKwYBBAHaRw8BAQdAD/P5Nvvnvk66SxBBHDbhRml9ORg1WV5CvzKY
 -----END PGP PUBLIC KEY BLOCK-----
`, []string{"deb [signed-by=" + keyring + "] http://mirror.example/debian bookworm main non-free"}},
		{"foreign archives", "sources.list.d/foreign.list", `deb https://one.example/linux/debian bookworm stable
deb https://two.example/apt cloud-sdk-bookworm main
deb https://three.example/apt stable main
`, nil},
		{"a stanza that is off", "sources.list.d/debian.sources", `Enabled: no
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm
Components: main
`, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			path := filepath.Join(root, "etc/apt", tc.file)
			if err := os.MkdirAll(filepath.Join(root, "etc/apt/sources.list.d"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(tc.text), 0o644); err != nil {
				t.Fatal(err)
			}
			got := function(t, `archive_sources "$1" bookworm "$2" main non-free`, root, keyring)
			if want := strings.Join(append(tc.want, ""), "\n"); got != want {
				t.Errorf("got\n%swant\n%s", got, want)
			}
		})
	}
}

// What a dead engine left is removed, what a living program owns is not.
func TestClearStale(t *testing.T) {
	sleep := exec.Command("sleep", "60")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sleep.Process.Kill(); _ = sleep.Wait() }()
	// A child that nobody waits for is a zombie once it has ended.
	zombie := exec.Command("true")
	pipe, err := zombie.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := zombie.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = pipe.Read(make([]byte, 1)) // returns when it has ended
	defer func() { _ = zombie.Wait() }()

	for _, tc := range []struct {
		name, pid, program string
		kept               bool
	}{
		{"nobody", "4194999", "dockerd", false},
		{"an empty file", "", "dockerd", false},
		{"another program", strconv.Itoa(sleep.Process.Pid), "dockerd", false},
		{"a zombie", strconv.Itoa(zombie.Process.Pid), "true", false},
		{"the program itself", strconv.Itoa(sleep.Process.Pid), "sleep", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			run := t.TempDir()
			file := filepath.Join(run, "docker.pid")
			if err := os.WriteFile(file, []byte(tc.pid+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			// The test's process stands for dockerd: alive is asked for its name instead.
			out := function(t, `run=$1; program=$2; eval "$(declare -f alive | sed '1s/alive/really_alive/')"; `+
				`alive() { really_alive "$1" "$program"; }; as_root() { "$@"; }; clear_stale`, run, tc.program)
			_, err := os.Stat(file)
			if kept := err == nil; kept != tc.kept {
				t.Errorf("kept: %v, want %v; setup said %q", kept, tc.kept, out)
			}
		})
	}
}
