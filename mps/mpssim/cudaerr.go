package mpssim

import "fmt"

// CUDA driver errors that a client can meet; numbers and names are CUDA's.
const (
	errOutOfMemory         = 2
	errDeviceUnavailable   = 46
	errNoDevice            = 100
	errIllegalAddress      = 700
	errMPSConnectionFailed = 805
	errMPSRPCFailure       = 806
	errMPSServerNotReady   = 807
	errMPSMaxClients       = 808
	errMPSClientTerminated = 810
)

var errorNames = map[int]string{
	errOutOfMemory:         "CUDA_ERROR_OUT_OF_MEMORY",
	errDeviceUnavailable:   "CUDA_ERROR_DEVICE_UNAVAILABLE",
	errNoDevice:            "CUDA_ERROR_NO_DEVICE",
	errIllegalAddress:      "CUDA_ERROR_ILLEGAL_ADDRESS",
	717:                    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
	719:                    "CUDA_ERROR_LAUNCH_FAILED",
	errMPSConnectionFailed: "CUDA_ERROR_MPS_CONNECTION_FAILED",
	errMPSRPCFailure:       "CUDA_ERROR_MPS_RPC_FAILURE",
	errMPSServerNotReady:   "CUDA_ERROR_MPS_SERVER_NOT_READY",
	errMPSMaxClients:       "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
	errMPSClientTerminated: "CUDA_ERROR_MPS_CLIENT_TERMINATED",
}

// Error is a CUDA error by its number.
type Error int

func (e Error) Error() string {
	name := errorNames[int(e)]
	if name == "" {
		name = "CUDA_ERROR"
	}
	return fmt.Sprintf("%s (%d)", name, int(e))
}
