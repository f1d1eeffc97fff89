"""Methods of federated learning: one file each, with the server's and the clients' half."""
