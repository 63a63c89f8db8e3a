"""The files of whole runs, and plugins that tests install into a folder."""
