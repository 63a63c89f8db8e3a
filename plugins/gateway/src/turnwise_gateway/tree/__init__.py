"""The tree of a session's conversations: finds the record that a request continues."""
