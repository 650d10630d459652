package nvmlsim

// Behaviour is something the library does, with how we know that NVML does it.
type Behaviour struct {
	Does     string
	Evidence string // [D] nvml.h says so, [C] a client's code relies on it, [F] seen in the field, or inferred
	Variant  string // inferred ones: the steer key's name of the other way; "" where there is none
	Other    string // what it does in the variant
}

func knownVariant(name string) bool {
	for _, b := range Behaviours {
		if b.Variant == name && name != "" {
			return true
		}
	}
	return false
}

// Behaviours is the evidence for all that the library does beyond returning what the steer file says.
var Behaviours = []Behaviour{}
