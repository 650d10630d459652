package mps

import (
	"fmt"
	"strconv"
	"strings"
)

// replyLines are the lines of a reply that are not empty.
func replyLines(text string) []string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

// replyError finds in a reply what the exit status does not tell.
func replyError(lines []string) error {
	for _, line := range lines {
		switch {
		case strings.HasPrefix(line, "Unknown command"):
			return fmt.Errorf("%w: %s", ErrUnknownCommand, line)
		case line == "Server not found", strings.HasPrefix(line, "Server ") && strings.Contains(line, " not found"):
			return fmt.Errorf("%w: %s", ErrNoServer, line)
		case strings.HasPrefix(line, "Insufficient privileges"), strings.HasPrefix(line, "Not enough privilege"):
			return fmt.Errorf("%w: %s", ErrPrivilege, line)
		}
	}
	return nil
}

func word(lines []string) (string, error) {
	if len(lines) != 1 {
		return "", fmt.Errorf("%w: %q", ErrReply, strings.Join(lines, "; "))
	}
	return lines[0], nil
}

func pids(lines []string) ([]int, error) {
	list := make([]int, 0, len(lines))
	for _, line := range lines {
		pid, err := strconv.Atoi(line)
		if err != nil || pid < 1 {
			return nil, fmt.Errorf("%w: %q is no pid", ErrReply, line)
		}
		list = append(list, pid)
	}
	return list, nil
}

// parsePercent reads a percentage as the daemon shows it: with a point, which
// tells it from a pid or a priority.
func parsePercent(text string) (float64, error) {
	value, err := strconv.ParseFloat(text, 64)
	if err != nil || !strings.Contains(text, ".") || value < 0 || value > 100 {
		return 0, fmt.Errorf("%w: %q is no percentage", ErrReply, text)
	}
	return value, nil
}

// isLimit tells a memory limit: digits and M or G.
func isLimit(text string) bool {
	digits, found := strings.CutSuffix(text, "M")
	if !found {
		digits, found = strings.CutSuffix(text, "G")
	}
	_, err := strconv.ParseUint(digits, 10, 64)
	return found && err == nil
}

// parsePS reads the rows of ps under its header: PID ID SERVER DEVICE NAMESPACE COMMAND [D].
func parsePS(lines []string) ([]ClientProcess, error) {
	if len(lines) == 0 {
		return nil, nil
	}
	column := map[string]int{}
	for i, name := range strings.Fields(lines[0]) {
		column[name] = i
	}
	for _, name := range []string{"PID", "SERVER", "DEVICE", "COMMAND"} {
		if _, ok := column[name]; !ok {
			return nil, fmt.Errorf("%w: ps has no column %s: %q", ErrReply, name, lines[0])
		}
	}
	var rows []ClientProcess
	for _, line := range lines[1:] {
		fields := strings.Fields(line)
		if len(fields) <= column["COMMAND"] {
			return nil, fmt.Errorf("%w: row of ps: %q", ErrReply, line)
		}
		pid, err := strconv.Atoi(fields[column["PID"]])
		server, err2 := strconv.Atoi(fields[column["SERVER"]])
		if err != nil || err2 != nil {
			return nil, fmt.Errorf("%w: row of ps: %q", ErrReply, line)
		}
		rows = append(rows, ClientProcess{
			PID: pid, Server: server, Device: fields[column["DEVICE"]],
			Command: strings.Join(fields[column["COMMAND"]:], " "),
		})
	}
	return rows, nil
}
