"""A throughput report as one HTML page with plots. Imported only when a page is drawn."""
