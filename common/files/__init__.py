"""Files and hashes that all packages use: output directories, JSON, content hashes, the alphabet."""
