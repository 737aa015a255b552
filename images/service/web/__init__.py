"""HTTP: routes, connections, admission, metrics and the page."""
