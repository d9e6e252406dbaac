def pytest_addoption(parser):
    parser.addoption('--kills', type=int, default=3, help='how often tests/test_kill.py kills a run')
