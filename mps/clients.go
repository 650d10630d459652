package mps

import "context"

// ClientPIDs are the processes that the GPU's server has as clients now, as the
// host numbers them: get_client_list. ErrNoServer when no server is recorded.
func (h *Holder) ClientPIDs(ctx context.Context) ([]int, error) {
	h.mu.Lock()
	server := h.state.Server
	h.mu.Unlock()
	if server.PID == 0 {
		return nil, ErrNoServer
	}
	return h.daemon.control.Clients(ctx, server.PID)
}
