"""Stand-ins for servers, real over the wire."""
