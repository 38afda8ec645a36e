//! Messages from a thread to a worker, and between idle workers.

use bytes::Bytes;
use criterion::{Criterion, Throughput};
use gw_data_plane::support::bench::{IdleWorker, LocalPipe, rally};

pub(crate) fn benches(criterion: &mut Criterion) {
    let workers = [IdleWorker::start(0).unwrap(), IdleWorker::start(1).unwrap()];
    let mut group = criterion.benchmark_group("mailbox");

    group.bench_function("round trip to a worker that sleeps", |bencher| {
        bencher.iter(|| workers[0].round_trip().unwrap());
    });
    // One of these messages is the round trip's.
    const MANY: usize = 1000;
    group.throughput(Throughput::Elements(MANY as u64));
    group.bench_function("post and drain, 1000 at a time", |bencher| {
        bencher.iter(|| workers[0].post_and_drain(MANY).unwrap());
    });

    group.throughput(Throughput::Elements(1));
    group.bench_function("pipe, one thread, no wait", |bencher| {
        let mut pipe = LocalPipe::new(&workers[0]);
        let data = Bytes::from_static(&[0; 100]);
        bencher.iter(|| assert!(pipe.pass(data.clone())));
    });
    for frames in [1, 16] {
        // One hop: send through the pipe, post the wake, deliver, receive.
        group.bench_function(
            format!("pipe, hop between two workers, {frames} under way"),
            |bencher| {
                bencher.iter_custom(|hops| {
                    rally(
                        &workers[0],
                        &workers[1],
                        frames,
                        100,
                        usize::try_from(hops).unwrap(),
                    )
                    .unwrap()
                });
            },
        );
    }
    group.finish();
}
