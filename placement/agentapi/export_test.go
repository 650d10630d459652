package agentapi

// SetProtocol makes a server one of another release.
func (s *Server) SetProtocol(protocol uint32) { s.protocol = protocol }
