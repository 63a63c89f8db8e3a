"""Parts that engine plugins share. Import the modules; this package re-exports nothing and loads no tensor library."""
