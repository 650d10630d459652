package taskdef

import (
	"errors"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
)

const (
	unitsPerVCPU = 1024
	mibPerGB     = 1024 // ECS's "1 GB" is 1024 MiB

	minTaskCPU, maxTaskCPU = 128, 196608
	minMemoryMiB           = 6 // Docker 20.10 refuses a container with less [SDK]
)

// TaskCPU is the task's own CPU in ECS units; false where it names none.
func TaskCPU(t *types.TaskDefinition) (units int64, ok bool) {
	if t.Cpu == nil {
		return 0, false
	}
	units, err := parseAmount(*t.Cpu, vcpuText, unitsPerVCPU)
	return units, err == nil
}

// TaskMemory is the task's own memory limit in MiB; false where it names none.
func TaskMemory(t *types.TaskDefinition) (mib int64, ok bool) {
	if t.Memory == nil {
		return 0, false
	}
	mib, err := parseAmount(*t.Memory, gbText, mibPerGB)
	return mib, err == nil
}

// "1 vCPU", ".25 vcpu", "1GB", "0.5 GB": as RegisterTaskDefinition takes them.
var (
	vcpuText = regexp.MustCompile(`^(\d{0,6})(?:\.(\d{1,9}))? ?(?:vCPU|vcpu)$`)
	gbText   = regexp.MustCompile(`^(\d{0,9})(?:\.(\d{1,9}))? ?GB$`)
)

var errAmount = errors.New("not an amount")

// parseAmount reads whole base units, or a decimal number of larger ones that
// comes to a whole number of base units. No float is used, so 0.1 GB is refused
// rather than rounded.
func parseAmount(s string, larger *regexp.Regexp, factor int64) (int64, error) {
	if n, err := strconv.ParseInt(s, 10, 64); err == nil && !strings.ContainsAny(s, "+-") {
		if n > math.MaxInt32 {
			return 0, errAmount
		}
		return n, nil
	}
	m := larger.FindStringSubmatch(s)
	if m == nil || m[1] == "" && m[2] == "" {
		return 0, errAmount
	}
	whole, _ := strconv.ParseInt("0"+m[1], 10, 64)
	fraction, _ := strconv.ParseInt("0"+m[2], 10, 64)
	scale := int64(1)
	for range len(m[2]) {
		scale *= 10
	}
	if fraction*factor%scale != 0 {
		return 0, errAmount
	}
	n := whole*factor + fraction*factor/scale
	if n > math.MaxInt32 {
		return 0, errAmount
	}
	return n, nil
}
