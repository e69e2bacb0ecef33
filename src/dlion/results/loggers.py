class _No:
    def log(self, row):
        pass

    def finish(self, s):
        pass


def make_logger(node, config, directory, parameters):
    return _No()
