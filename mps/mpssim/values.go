package mpssim

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// How the daemon reads what it is told. None of this reports an error: a value
// that makes no sense becomes another one, silently. [B], R535.

// atoi is C's: spaces, a sign, digits; the rest is ignored; what is too large wraps
// to 32 bits.
func atoi(s string) int {
	n, _, _ := leadingInt(s)
	return int(int32(n))
}

// leadingInt reads a number as strtol does, and says how much of s it was.
func leadingInt(s string) (n int64, used int, ok bool) {
	i := 0
	for i < len(s) && (s[i] == ' ' || s[i] == '\t') {
		i++
	}
	start := i
	if i < len(s) && (s[i] == '-' || s[i] == '+') {
		i++
	}
	digits := i
	for i < len(s) && s[i] >= '0' && s[i] <= '9' {
		i++
	}
	if i == digits {
		return 0, 0, false
	}
	n, err := strconv.ParseInt(strings.TrimPrefix(s[start:i], "+"), 10, 64)
	if err != nil { // strtol saturates
		n = math.MaxInt64
		if s[start] == '-' {
			n = math.MinInt64
		}
	}
	return n, i, true
}

// ordinal reads a device ordinal. A token that is not wholly a number is taken for
// a device's UUID.
func ordinal(s string) (n int64, isOrdinal bool) {
	n, used, ok := leadingInt(s)
	return int64(int32(n)), ok && used == len(s) // it wraps [B]
}

const maxOrdinal = 31 // [B]

// limitBytes reads a memory limit: digits as strtoull reads them (a minus wraps
// around), then the next letter: g or G means GiB, everything else MiB. 0 is no limit.
func limitBytes(s string) uint64 {
	i := 0
	for i < len(s) && (s[i] == ' ' || s[i] == '\t') {
		i++
	}
	negative := i < len(s) && s[i] == '-'
	if i < len(s) && (s[i] == '-' || s[i] == '+') {
		i++
	}
	digits := i
	for i < len(s) && s[i] >= '0' && s[i] <= '9' {
		i++
	}
	if i == digits {
		return 0
	}
	n, err := strconv.ParseUint(s[digits:i], 10, 64)
	if err != nil {
		n, negative = math.MaxUint64, false
	}
	if negative {
		n = -n
	}
	if i < len(s) && (s[i] == 'g' || s[i] == 'G') {
		return n << 30
	}
	return n << 20
}

// showLimit is how the daemon prints a limit: whole GiB when there is one, cut off.
func showLimit(bytes uint64) string {
	if bytes >= 1<<30 {
		return fmt.Sprintf("%dG", bytes>>30)
	}
	return fmt.Sprintf("%dM", bytes>>20)
}

// percent reads an active thread percentage as strtof does, and says whether it
// lies in (0, 100].
func percent(s string) (float64, bool) {
	v, ok := leadingFloat(s)
	return v, ok && v > 0 && v <= 100
}

func showPercent(p float64) string { return fmt.Sprintf("%.1f", p) }

// leadingFloat reads the longest beginning of s that is a C floating-point number.
func leadingFloat(s string) (float64, bool) {
	s = strings.TrimLeft(s, " \t")
	for end := len(s); end > 0; end-- {
		head := s[:end]
		if strings.ContainsAny(head, "_") {
			continue
		}
		if v, err := strconv.ParseFloat(head, 64); err == nil {
			return v, true
		}
		// strtod takes a hexadecimal number without exponent, Go does not.
		if bare := strings.TrimLeft(head, "+-"); strings.HasPrefix(strings.ToLower(bare), "0x") {
			if v, err := strconv.ParseFloat(head+"p0", 64); err == nil {
				return v, true
			}
		}
	}
	return 0, false
}

// memLimits reads CUDA_MPS_PINNED_DEVICE_MEM_LIMIT of a client or a daemon:
// dev=value[,dev=value...], dev an ordinal or a UUID (or its beginning, as in
// CUDA_VISIBLE_DEVICES) of the devices seen, in their order. A part of a wrong form
// is ignored.
func memLimits(env string, devices []string, uuids bool) map[int]uint64 {
	limits := map[int]uint64{}
	for _, part := range strings.Split(env, ",") {
		dev, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		bytes := limitBytes(value)
		if !ok || bytes == 0 {
			continue
		}
		if n, isOrdinal := ordinal(dev); isOrdinal {
			if n >= 0 && n < int64(len(devices)) {
				limits[int(n)] = bytes
			}
			continue
		}
		for i, uuid := range devices {
			if uuids && dev != "" && strings.HasPrefix(uuid, dev) {
				limits[i] = bytes
			}
		}
	}
	return limits
}
