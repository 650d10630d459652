// Package ecsjson is the JSON of the Amazon ECS API, read strictly: one
// implementation of smithy-go's ShapeDeserializer and ShapeSerializer over a
// parsed tree, for the generated Deserialize and Serialize of ecs/types. A
// service that the SDK's own reader would answer leniently (unknown members
// skipped, the first error returned) is here told everything that is wrong with
// what was sent, each with its path, the value seen and the rule, in an order
// that does not depend on the order of the text.
//
// Everything here is a function of its arguments: no IO, no goroutine, nothing
// kept between calls. Text of any kind, however broken, gives Problems and
// never a panic; its size and depth are bounded before it is walked.
package ecsjson
