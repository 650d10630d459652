package taskdef

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/berth-gpu/berth/api/ecsjson"
)

// gpus are the rules of sharing: one kind in a task, and what is shared is one
// GPU, whose memory is given out in MiB.
func (c *checker) gpus() {
	whole, shared, all := "", "", "" // where each was asked for first
	for i := range c.def.ContainerDefinitions {
		requirements := c.def.ContainerDefinitions[i].ResourceRequirements
		for j := range requirements {
			at := fmt.Sprintf("%s.resourceRequirements[%d]", container(i), j)
			r := &requirements[j]
			if !c.requirement(at, r) {
				continue
			}
			if j > 0 && requirements[j-1].Type == types.ResourceTypeGpu {
				c.report(at, "", "a second GPU requirement; a container has at most one")
				continue
			}
			switch {
			case r.SharingStrategy != nil:
				shared = cmp.Or(shared, at)
				if whole != "" {
					c.report(at, "", "shares a GPU while %s asks for whole ones; the containers of a task all do the same", whole)
				}
			case shared != "":
				c.report(at, "", "asks for whole GPUs while %s shares one; the containers of a task all do the same", shared)
			case all != "" || *r.Value == allGPUs && whole != "":
				c.report(at+".value", ecsjson.Quote(*r.Value), "%s leaves none for another container", cmp.Or(all, "ALL"))
			}
			if r.Value != nil && r.SharingStrategy == nil {
				whole = cmp.Or(whole, at)
				if *r.Value == allGPUs {
					all = cmp.Or(all, at)
				}
			}
		}
	}
}

var (
	countText    = regexp.MustCompile(`^[1-9][0-9]{0,2}$`)
	fractionText = regexp.MustCompile(`^[0-9]*\.[0-9]+$`)
)

// requirement judges one by itself and says whether it may be held against the
// others.
func (c *checker) requirement(at string, r *types.ResourceRequirement) bool {
	before := len(c.found)
	switch {
	case r.Type == "":
		c.report(at+".type", "", "required")
		return false
	case r.Type != types.ResourceTypeGpu && r.SharingStrategy != nil:
		c.quoted(at+".type", string(r.Type), "sharingStrategy is for GPU only, and berth gives no other devices")
		return false
	case r.Type != types.ResourceTypeGpu:
		c.quoted(at+".type", string(r.Type), "berth gives GPUs only")
		return false
	case r.Value != nil && r.SharingStrategy != nil:
		c.report(at, "", "GPU has both value and sharingStrategy; give one")
	case r.Value == nil && r.SharingStrategy == nil:
		c.report(at, "", "GPU has neither value nor sharingStrategy; give one")
	}
	if v := value(r.Value); r.Value != nil && v != allGPUs && !countText.MatchString(v) {
		switch {
		case fractionText.MatchString(v):
			c.quoted(at+".value", v, "a GPU is not given in fractions; for part of one use sharingStrategy.nvidiaMps")
		case strings.EqualFold(v, allGPUs):
			c.quoted(at+".value", v, "want ALL in capitals")
		default:
			c.quoted(at+".value", v, "want a number of GPUs from 1 to 999, or ALL")
		}
	}
	if mps, ok := r.SharingStrategy.(*types.SharingStrategyMemberNvidiaMps); ok {
		below := at + ".sharingStrategy.nvidiaMps"
		if mps.Value.Memory == nil {
			c.report(below+".memory", "", "required")
		}
		c.atLeast(below+".memory", mps.Value.Memory, 1)
		c.between(below+".maxComputePercent", mps.Value.MaxComputePercent, 1, 100)
	}
	return len(c.found) == before && !c.unread.Touch(at)
}

// leadsOut are the capabilities that let root leave its container, and with it
// the device rules that keep it to its GPU: mounts and cgroups, kernel modules,
// raw memory, files by handle.
var leadsOut = []string{"ALL", "DAC_READ_SEARCH", "SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO"}

// isolation is what a container of a task on a shared GPU may not have, because
// it would reach the daemon or the devices of the others.
func (c *checker) isolation(at string, d *types.ContainerDefinition) {
	if value(d.Privileged) {
		switch {
		case c.shared:
			c.report(at+".privileged", "true", "not on a shared GPU: a privileged container opens every device")
		case c.DisablePrivileged:
			c.report(at+".privileged", "true", "this machine takes no privileged containers (docker.disablePrivileged): they open every GPU")
		}
	}
	p := d.LinuxParameters
	if p == nil {
		return
	}
	if c.shared && len(p.Devices) > 0 {
		c.report(at+".linuxParameters.devices", "", "not on a shared GPU: berth gives its devices")
	}
	if p.Capabilities == nil || !c.shared {
		return
	}
	for i, name := range p.Capabilities.Add {
		if slices.Contains(leadsOut, name) {
			c.quoted(fmt.Sprintf("%s.linuxParameters.capabilities.add[%d]", at, i), name, "not on a shared GPU: it leads out of the container")
		}
	}
}
