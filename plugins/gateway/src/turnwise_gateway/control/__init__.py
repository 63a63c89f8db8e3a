"""Control ports: scores of sessions from outside, transcripts, and the server of such a port."""
