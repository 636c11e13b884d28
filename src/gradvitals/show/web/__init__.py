"""The live page: a small server on the loopback interface and the files a browser needs, no network."""
