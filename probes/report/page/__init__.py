"""A report as one HTML page with plots. Imported only when a page is drawn: it needs matplotlib."""
