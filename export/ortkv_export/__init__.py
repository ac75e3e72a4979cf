"""What makes the folders ortkv runs: exporting, checking against the original, the manifest."""
