//! Power cuts after `gw-gateway backup` and `gw-gateway restore` have succeeded.

use std::process::Command;

use super::api;
use super::power_cuts::loss_of;
use crate::support::lossy_disk::LossyDisk;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{config_text, gw_gateway};

fn succeed(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_backup_and_a_restored_gateway_survive_a_power_cut() {
    let Some(mut disk) = LossyDisk::mount() else {
        return;
    };
    let prepared = Prepared::new();
    let file = disk.path().join("backup.tar.zst");
    for cut in 0..6 {
        // With a port, so that the backup would be that of a gateway that runs.
        let stopped = prepared
            .config()
            .replace("127.0.0.1:0\"\nworkers", "127.0.0.1:1\"\nworkers");
        std::fs::write(prepared.path("gateway.toml"), stopped).unwrap();
        let mut backup = gw_gateway();
        backup.args(["backup", "--force", "--config"]);
        succeed(backup.arg(prepared.path("gateway.toml")).arg(&file));
        disk.cut_power(loss_of(cut));

        let data_dir = disk.path().join(format!("restored{cut}/data"));
        let config = config_text(&data_dir, 0);
        std::fs::write(prepared.path("restored.toml"), &config).unwrap();
        let mut restore = gw_gateway();
        restore.args(["restore", "--config"]);
        succeed(restore.arg(prepared.path("restored.toml")).arg(&file));
        disk.cut_power(loss_of(cut));
        let served = prepared.serve_with(&config);
        let api = api(served.admin_address, &data_dir);
        assert_eq!(api.list("/accounts/demo/services").len(), 1);
    }
}
