"""Parts of a distributed runtime that do not depend on Ray: wire formats, pools, dispatch and supervision."""
