package nvmlsim

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// How a process uses a GPU, as its memfd's name says.
const (
	KindServer  = 'S' // an MPS server
	KindClient  = 'M' // a client of one
	KindCompute = 'C' // a process with a context of its own
)

// Hold makes this process hold bytes of a GPU until the file is closed or the process ends, however it ends. More or
// less is held after Truncate. The library looks at processes whose comm begins with nvidia-cuda-mps or cuda-client.
func Hold(uuid string, kind rune, bytes int64) (*os.File, error) {
	name := fmt.Sprintf("cuda:%s:%c", uuid, kind)
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(bytes); err != nil {
		f.Close()
		return nil, fmt.Errorf("memfd %s of %d bytes: %w", name, bytes, err)
	}
	return f, nil
}
