"""`turnwise gateway serve`: an engine, a port for agents, and a control port that opens sessions."""
