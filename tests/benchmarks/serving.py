"""Load on a running server: python tests/benchmarks/serving.py URL FOLDER [CLIENTS [SECONDS]].

Each client sends an image of the folder as soon as it has the answer to the one before. Prints images/s, the median
and the 99th percentile of the time to an answer, and how many were not answered with 200. The server's share of
bare inference is to be had from `vit_jax benchmark inference` before and after.
"""

import http.client
import pathlib
import statistics
import sys
import threading
import time
from urllib.parse import urlsplit


def client(place: str, bodies: list[bytes], until: float, times: list[float], bad: list) -> None:
    connection, number = http.client.HTTPConnection(place, timeout=60), 0
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            connection.request("POST", "/predict", bodies[number % len(bodies)])
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                bad.append(answer)
        except OSError as error:
            bad.append(error)
            connection.close()
        times.append(time.monotonic() - began)
        number += 1


def main(url: str, folder: str, clients: str = "32", seconds: str = "20") -> None:
    files = sorted(pathlib.Path(folder).glob("*.JPEG")) or sorted(pathlib.Path(folder).iterdir())
    bodies = [file.read_bytes() for file in files[:256]]
    until, times, bad = time.monotonic() + float(seconds), [], []
    count = int(clients)
    threads = [
        threading.Thread(
            target=client,
            args=(urlsplit(url).netloc, bodies[i:] + bodies[:i], until, times, bad),
        )
        for i in range(count)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.monotonic() - began
    percentiles = statistics.quantiles(times, n=100)
    print(
        f"{count} clients: {len(times) / spent:.1f} images/s, p50 {1000 * percentiles[49]:.0f} ms, "
        f"p99 {1000 * percentiles[98]:.0f} ms, {len(bad)} errors {bad[:2]}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
