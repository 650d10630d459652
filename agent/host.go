package agent

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds"
	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/cgroup"
	"github.com/berth-gpu/berth/agent/engine"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/config/taskdef"
)

// hostCPUUnits is the machine's CPU in ECS units: 1024 a processor.
func hostCPUUnits() int64 { return int64(runtime.NumCPU()) * 1024 }

// hostMemoryMiB is MemTotal of /proc/meminfo, 0 where it cannot be read.
func hostMemoryMiB() int64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), "MemTotal:"); ok {
			kib, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64)
			return kib / 1024
		}
	}
	return 0
}

func reservedPorts(r config.Reserved) []taskdef.Port {
	var out []taskdef.Port
	for _, p := range r.Ports {
		out = append(out, taskdef.Port{Host: int(p), Protocol: "tcp"})
	}
	for _, p := range r.UDPPorts {
		out = append(out, taskdef.Port{Host: int(p), Protocol: "udp"})
	}
	return out
}

func openCgroups(s *config.Agent, info engine.Info) (*cgroup.Tree, error) {
	driver, err := cgroup.ParseDriver(info.CgroupDriver, info.CgroupVersion)
	if err != nil {
		return nil, err
	}
	return cgroup.Open(driver, s.Instance)
}

// identify asks the EC2 instance metadata service who this machine is, once;
// elsewhere than on EC2 nobody answers.
func (a *Agent) identify(ctx context.Context) {
	if !onEC2() {
		return
	}
	ask, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	doc, err := imds.New(imds.Options{}).GetInstanceIdentityDocument(ask, nil)
	if err != nil {
		a.log.Warn("this looks like EC2, and its instance metadata service does not answer", zap.Error(err))
		return
	}
	a.post(func() { a.ec2 = doc.InstanceID })
}

// onEC2 looks at the firmware's vendor, so that no request is sent to a
// link-local address of a network that is not Amazon's.
func onEC2() bool {
	for _, f := range []string{"/sys/class/dmi/id/sys_vendor", "/sys/class/dmi/id/board_vendor"} {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), "Amazon EC2") {
			return true
		}
	}
	return false
}
