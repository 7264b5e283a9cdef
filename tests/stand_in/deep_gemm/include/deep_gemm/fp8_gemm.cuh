// stand-in header of the tests
