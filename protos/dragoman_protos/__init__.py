"""The wire protocol: .proto files and the stubs generated from them."""
