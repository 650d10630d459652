package fit

// PlaceIn and PlaceOut are Place's arguments and results, for the flight recorder.
type (
	PlaceIn struct {
		Machine Machine `json:"machine"`
		Demand  Demand  `json:"demand"`
	}
	PlaceOut struct {
		GPUs    []string `json:"gpus,omitempty"`
		Reasons []Reason `json:"reasons,omitempty"`
	}
)

// Do is Place.
func (in PlaceIn) Do() (out PlaceOut) {
	out.GPUs, out.Reasons = Place(in.Machine, in.Demand)
	return out
}
