package mpssim

// Behaviour is one thing about MPS that a program outside can see.
type Behaviour struct {
	Says     string // what is so
	Evidence Evidence
	Variant  string // for an inferred one: the name of the second variant
	Else     string // what is so under it
}

// Evidence is what a behaviour rests on.
type Evidence string

// Kinds of evidence.
const (
	Seen       Evidence = "B"        // observed on the real R535 control daemon, its server and libcuda
	Documented Evidence = "D"        // NVIDIA's documentation
	Reported   Evidence = "I"        // logs in issues of public projects
	Inferred   Evidence = "inferred" // fits what is known; the second variant might be so instead
)

// Behaviours is what the simulator does, and why it is believed to be so.
var Behaviours = []Behaviour{
	{Says: "one instance per pipe folder, by a POSIX write lock on control_lock; the second says so and ends with 1", Evidence: Seen},
	{Says: "control 0666 and control_privileged 0755 are SOCK_SEQPACKET sockets, control_lock is 0666, log a fifo 0777", Evidence: Seen},
	{Says: "a missing pipe or log folder is made, one level of it; a missing log folder is only worth a warning", Evidence: Seen},
	{Says: "a pipe folder's path has at most 87 bytes; with more the daemon ends with 1 without a word", Evidence: Seen},
	{Says: "-f writes control and server lines to stdout and no log file; -d returns when it listens", Evidence: Seen},
	{Says: "signals are not handled: TERM, INT, HUP, USR1 and KILL end the daemon and orphan its server", Evidence: Seen},
	{Says: "as pid 1 the daemon ignores TERM", Evidence: Seen},
	{Says: "the utility's status is 0 whenever it talked to a daemon, and it waits without limit for one that does not answer", Evidence: Seen},
	{Says: "one utility is served at a time; another is sent away with Cannot send command and status 1 (the real one: at times without a word)", Evidence: Seen},
	{Says: "a connection that says nothing wedges the daemon, clients too, until it closes", Evidence: Seen},
	{Says: "commands as arguments are ignored; one a line of stdin; unknown ones answered with Unknown command", Evidence: Seen},
	{Says: "values that make no sense become others without an error (1.5G is 1M, -1G is 17179869183G, 0x20 percent is 32.0)", Evidence: Seen},
	{Says: "anybody may set defaults; start_server for others and shutdown_server need root; quit needs control_privileged, root or not", Evidence: Seen},
	{Says: "quit waits for servers without limit; once its utility has gone, commands are carried out and never answered, but for quit -t", Evidence: Seen},
	{Says: "shutdown_server -f and quit -t end a server by SIGINT: one that ignores it stays, and quit waits on", Evidence: Seen},
	{Says: "the daemon's status is that of the first server that failed", Evidence: Seen},
	{Says: "quit's status is 0 with no server to wait for, the server's when it was the first, 1 when any had ended before", Evidence: Seen},
	{Says: "the daemon complains on stdout, the utility on stderr", Evidence: Seen},
	{Says: "a command line that is not known makes it the utility", Evidence: Seen},
	{Says: "quit removes the log fifo (and the pid file) alone, and its utility can return before that", Evidence: Seen},
	{Says: "the server is found through the daemon's PATH, is its child in its session, has its environment and no arguments", Evidence: Seen},
	{Says: "six servers are tried for each waiting client, then it gets 805; one for each start_server", Evidence: Seen},
	{Says: "start_server for another user than the running server's waits for that one to go", Evidence: Seen},
	{Says: "a server killed by a signal exited with status 0", Evidence: Seen},
	{Says: "a server that is still starting is <busy>: empty answers", Evidence: Seen},
	{Says: "clients that wait are kept, also when they have gone", Evidence: Seen},
	{Says: "a client touches only <pipe folder>/control, and runs without MPS when nothing listens there", Evidence: Seen},
	{Says: "a client outside the daemon's pid namespace and its descendants has pid 0", Evidence: Seen},
	{Says: "get_server_status answers INITIALIZING, ACTIVE or FAULT (R550 and newer)", Evidence: Documented},
	{Says: "-multiuser-server maps all clients to a server of root", Evidence: Documented},
	{Says: "the memory cap is min(server's, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT), per process; beyond it CUDA_ERROR_OUT_OF_MEMORY", Evidence: Documented},
	{Says: "the active thread percentage is the lower one of server's and client's", Evidence: Documented},
	{Says: "defaults are read when a server is spawned, per-server values by new clients", Evidence: Documented},
	{Says: "48 clients on a GPU, 60 from R590; the next gets 808", Evidence: Documented},
	{Says: "terminate_client destroys a client's contexts (810) and leaves its process", Evidence: Documented},
	{Says: "server lines of a good start; R580 logs a start with the server's pid", Evidence: Reported},
	{Says: "a fatal fault reaches every client of the GPU; the status is FAULT, and new ones get 807, until all of them have exited", Evidence: Documented},
	{
		Says: "clients live on when only the control daemon dies", Evidence: Inferred,
		Variant: "clients-die-with-daemon", Else: "they get 806",
	},
	{
		Says: "under EXCLUSIVE_PROCESS a new daemon's server fails while an orphan of the old one holds the GPU", Evidence: Inferred,
		Variant: "server-beside-orphan", Else: "it starts",
	},
	{
		Says: "a GPU's UUID as key of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT counts", Evidence: Inferred,
		Variant: "uuid-limit-ignored", Else: "it is ignored: no cap",
	},
	{
		Says: "get_device_client_list prints a device's UUID on a line of its own, then a pid a line", Evidence: Inferred,
		Variant: "device-clients-in-one-line", Else: "UUID and pids share a line",
	},
	{
		Says: "-v prints the bare binary version", Evidence: Inferred,
		Variant: "version-sentence", Else: "it prints a sentence",
	},
}

func knownVariant(name string) bool {
	for _, b := range Behaviours {
		if b.Variant == name && name != "" {
			return true
		}
	}
	return false
}
