//! An update of the agent's program and a power cut.

use super::*;
use crate::support::lossy_disk::{Loss, LossyDisk};
use crate::support::processes::process::{has_ended, send_signal};

#[test]
fn a_program_that_runs_is_on_the_disk() {
    let Some(mut disk) = LossyDisk::mount() else {
        return;
    };
    let prepared = Prepared::new();
    disk.take(&prepared.path("agent"));
    let backend = HeldBackend::start();
    let release = Release::new(&prepared);
    let signed = release.offer(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent::of(&prepared, &gateway);
    let config = it.configure(&release.configuration(&backend.url));
    for loss in [
        Loss::All,
        Loss::Data,
        Loss::AnyPart(fastrand::Rng::with_seed(1)),
    ] {
        let agent = it.start(&config);
        let worker = wait_for_stored(&agent, &signed);
        // The test has written this file itself.
        File::open(prepared.path("agent/agent.json"))
            .and_then(|file| file.sync_all())
            .unwrap();
        drop(agent);
        send_signal(worker, "KILL");
        eventually("the worker has ended", || has_ended(worker).then_some(()));
        disk.cut_power(loss);
        let version = update_record(&prepared)["current"]["version"].take();
        assert_eq!(version, signed.version.to_string());
        let [file] = <[_; 1]>::try_from(stored_programs(&prepared)).unwrap();
        assert_eq!(signed.verify_content(&fs::read(file).unwrap()), Ok(()));
    }
}
