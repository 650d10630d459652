package nvmlsim

const mib = 1 << 20

// Profiles of GPUs. Totals and reserved amounts are what nvidia-smi -q prints on such cards in the field (inferred
// to hold for every driver; a Spec may say anything else).

// H200 is an NVIDIA H200, 141 GB of HBM3e.
func H200() GPU { return profile("NVIDIA H200", 143771, 617, 9, 9, 0, 0x233510de) }

// H100 is an NVIDIA H100 80GB HBM3.
func H100() GPU { return profile("NVIDIA H100 80GB HBM3", 81559, 551, 9, 9, 0, 0x233010de) }

// A100 is an NVIDIA A100-SXM4-80GB.
func A100() GPU { return profile("NVIDIA A100-SXM4-80GB", 81920, 571, 7, 8, 0, 0x20b210de) }

// T4 is a Tesla T4, 16 GB. It has no MIG.
func T4() GPU {
	g := profile("Tesla T4", 15360, 388, 6, 7, 5, 0x1eb810de)
	g.MIG = -1
	return g
}

// P4 is a Tesla P4, 8 GB: Pascal, which MPS with limits does not support.
func P4() GPU {
	g := profile("Tesla P4", 7680, 106, 4, 6, 1, 0x1bb310de)
	g.MIG = -1
	return g
}

func profile(name string, totalMiB, reservedMiB int64, arch, major, minor int, device uint32) GPU {
	return GPU{Name: name, TotalBytes: totalMiB * mib, ReservedBytes: reservedMiB * mib, Architecture: arch,
		ComputeMajor: major, ComputeMinor: minor, PCIDevice: device, NUMANode: 0, ECC: 1, GPUPercent: 60, MemoryPercent: 30}
}

// Uniform is a machine of n GPUs of one kind: half of them on each of two NUMA nodes, pairs behind a PCIe switch, and with
// more than one Hopper or Ampere GPU an NVSwitch behind every link, as in an HGX board.
func Uniform(n int, kind func() GPU) Spec {
	var s Spec
	for i := range n {
		g := kind()
		g.NUMANode, g.PCIeSwitch = 2*i/n, i/2
		if n > 1 && (g.Architecture == 7 || g.Architecture == 9) {
			for l := range 12 + 6*(g.Architecture-7)/2 {
				g.Links = append(g.Links, Link{Remote: switchBusID(l), Switch: true})
			}
		}
		s.GPUs = append(s.GPUs, g)
	}
	return s
}

func switchBusID(link int) string {
	return []string{"00000000:04:00.0", "00000000:05:00.0", "00000000:06:00.0", "00000000:07:00.0"}[link%4]
}
