package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"golang.org/x/sys/unix"
)

// The rules here are the second line. The first refuses a task definition as it
// comes in; this one holds for whatever reaches Docker, whoever let it through.

// machine is what the rules must look up: the file system's links and the kind
// of a device node.
type machine struct {
	socket  string // of Docker, or a URL that is no path
	resolve func(path string) (string, error)
	device  func(path string) (major uint32, err error) // an error for what is no device node
}

// nvidiaMajor is the character major of /dev/nvidia<minor> and nvidiactl
// (Documentation/admin-guide/devices.txt of Linux).
const nvidiaMajor = 195

// escapes are the capabilities with which root in a container is root on the
// machine, so that it reaches the pipe folder of the MPS daemon: mounts and
// cgroup files, kernel code, raw IO, files by inode (open_by_handle_at crosses
// from the client folder to all of /run).
var escapes = []string{"ALL", "SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO", "DAC_READ_SEARCH", "BPF"}

// refused are the rules about the task and the container that need no look at
// the machine.
func refused(r Request) error {
	c, shared := r.Container, r.Grant.Shared
	switch mode := r.Task.NetworkMode; mode {
	case "", types.NetworkModeBridge, types.NetworkModeHost, types.NetworkModeNone:
	default:
		return fmt.Errorf("networkMode: %q; give bridge, host or none", mode)
	}
	switch mode := r.Task.PidMode; {
	case mode == "":
	case mode != types.PidModeHost:
		return fmt.Errorf("pidMode: %q; berth runs each container in its own, or all in the host's", mode)
	case shared:
		return fmt.Errorf("pidMode: %q; a container on a shared GPU may not see the machine's processes, the MPS daemon's among them", mode)
	}
	switch mode := r.Task.IpcMode; mode {
	case "", types.IpcModeHost, types.IpcModeNone:
	default:
		return fmt.Errorf("ipcMode: %q; give host or none", mode)
	}
	if value(c.Privileged) {
		switch {
		case shared:
			return r.errorf("privileged: true; a privileged container on a shared GPU could stop its MPS daemon")
		case !r.Settings.AllowPrivileged:
			return r.errorf("privileged: true; a privileged container can open every GPU of the machine, so this machine's settings refuse it")
		}
	}
	if p := c.LinuxParameters; shared && p != nil && p.Capabilities != nil {
		for i, name := range p.Capabilities.Add {
			if slices.Contains(escapes, strings.TrimPrefix(strings.ToUpper(name), "CAP_")) {
				return r.errorf("linuxParameters.capabilities.add[%d]: %q; on a shared GPU it would let the container reach the MPS daemon (refused are %s)",
					i, name, strings.Join(escapes, ", "))
			}
		}
	}
	for i, o := range c.DockerSecurityOptions {
		if kind := strings.FieldsFunc(o+" ", func(r rune) bool { return strings.ContainsRune(":= ", r) }); len(kind) == 0 || !slices.Contains([]string{"no-new-privileges", "apparmor", "label"}, kind[0]) {
			return r.errorf("dockerSecurityOptions[%d]: %q; give no-new-privileges, apparmor:PROFILE or label:VALUE", i, o)
		}
	}
	switch {
	case len(c.VolumesFrom) > 0:
		return r.errorf("volumesFrom[0]: %q; mount the same volume in both containers instead", value(c.VolumesFrom[0].SourceContainer))
	case len(c.Links) > 0:
		return r.errorf("links[0]: %q; publish a port and use it instead", c.Links[0])
	case len(c.EnvironmentFiles) > 0:
		return r.errorf("environmentFiles[0]: %q; give environment", value(c.EnvironmentFiles[0].Value))
	case len(c.Secrets) > 0:
		return r.errorf("secrets[0]: %q; berth reads no secrets", value(c.Secrets[0].Name))
	case len(c.CredentialSpecs) > 0:
		return r.errorf("credentialSpecs[0]: %q; they are for Windows", c.CredentialSpecs[0])
	case c.FirelensConfiguration != nil:
		return r.errorf("firelensConfiguration.type: %q; give a logConfiguration that Docker has", c.FirelensConfiguration.Type)
	case c.RepositoryCredentials != nil:
		return r.errorf("repositoryCredentials.credentialsParameter: %q; berth reads no secrets", value(c.RepositoryCredentials.CredentialsParameter))
	case c.LogConfiguration != nil && len(c.LogConfiguration.SecretOptions) > 0:
		return r.errorf("logConfiguration.secretOptions[0]: %q; berth reads no secrets", value(c.LogConfiguration.SecretOptions[0].Name))
	}
	return nil
}

// guardDevice is about a device node that a definition asks for by itself.
func guardDevice(r Request, field, host string, m machine) error {
	if r.Grant.Shared {
		return r.errorf("%s: %q; a container on a shared GPU gets no device nodes but its GPU's", field, host)
	}
	real, err := m.resolve(host)
	if err != nil {
		return r.errorf("%s: %w", field, err)
	}
	// Docker takes a folder too, and gives every device under it.
	major, err := m.device(real)
	if err != nil {
		return r.errorf("%s: %q: %w", field, host, err)
	}
	if major == nvidiaMajor || strings.HasPrefix(path.Base(real), "nvidia") {
		return r.errorf("%s: %q is a GPU's; ask for GPUs with resourceRequirements", field, host)
	}
	return nil
}

// guardPath is about a folder of the machine that a definition mounts. It
// returns the folder's real path, which is what Docker is given; Start looks
// again whether it still is one.
func guardPath(field, source string, shared bool, s Settings, m machine) (string, error) {
	if !path.IsAbs(source) {
		return "", fmt.Errorf("%s: %q; an absolute path", field, source)
	}
	real, err := m.resolve(source)
	if err != nil {
		return "", fmt.Errorf("%s: %w", field, err)
	}
	// The run folder holds the sockets over which root may stop an MPS daemon; no
	// container sees more of it than the client folder it is granted.
	kept := []string{s.runDir()}
	if shared {
		kept = append(kept, "/dev", "/proc", "/sys")
		if path.IsAbs(m.socket) {
			kept = append(kept, m.socket)
		}
		// Docker's own containerd, and the usual one: as good as Docker's socket.
		kept = append(kept, "/var/run/docker.sock", "/run/docker", "/run/containerd")
	}
	for i, k := range kept {
		realKept, err := m.resolve(k)
		if err != nil {
			return "", fmt.Errorf("%s: %q cannot be compared with %s: %w", field, source, k, err)
		}
		verb := touches(real, k)
		if verb == "" {
			verb = touches(real, realKept)
		}
		if verb == "" {
			continue
		}
		seen := fmt.Sprintf("%q", source)
		if real != path.Clean(source) {
			seen += " (" + real + ")"
		}
		who := "no container"
		if i > 0 {
			who = "no container on a shared GPU"
		}
		return "", fmt.Errorf("%s: %s %s %s, which %s may mount", field, seen, verb, k, who)
	}
	return real, nil
}

// guardDriver is about a Docker volume's options. Docker's local driver hands
// them to mount(2), so they are a way to every folder and file system of the
// machine.
func guardDriver(field, driver string, options map[string]string, shared bool, s Settings, m machine) error {
	if driver != "local" || len(options) == 0 {
		return nil
	}
	device, kind := options["device"], options["type"]
	bind := slices.ContainsFunc(strings.Split(options["o"], ","), func(o string) bool { return o == "bind" || o == "rbind" })
	switch {
	case bind || kind == "none" || kind == "bind":
		_, err := guardPath(field+".device", device, shared, s, m)
		return err
	case !shared, kind == "tmpfs", strings.HasPrefix(kind, "nfs"), kind == "cifs":
		return nil
	}
	return fmt.Errorf("%s.type: %q; a container on a shared GPU may mount tmpfs, nfs, cifs, or bind a folder", field, kind)
}

// touches is how a mounted folder reaches kept, in a word; empty: it does not.
func touches(real, kept string) string {
	switch {
	case real == kept:
		return "is"
	case within(real, kept):
		return "lies in"
	case within(kept, real):
		return "contains"
	}
	return ""
}

// within says that p is dir or lies in it; both are clean.
func within(p, dir string) bool {
	p, dir = path.Clean(p), path.Clean(dir)
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}

// resolve follows every link of a path, of which the last parts need not exist.
func resolve(p string) (string, error) {
	p = filepath.Clean(p)
	real, err := filepath.EvalSymlinks(p)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return real, err
	}
	if _, err := os.Lstat(p); err == nil {
		return "", fmt.Errorf("%q is a link to nothing", p)
	}
	if p == "/" {
		return p, nil
	}
	parent, err := resolve(filepath.Dir(p))
	return filepath.Join(parent, filepath.Base(p)), err
}

func deviceMajor(p string) (uint32, error) {
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		return 0, err
	}
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFCHR && t != unix.S_IFBLK {
		return 0, errors.New("it is no device node")
	}
	return unix.Major(st.Rdev), nil
}
