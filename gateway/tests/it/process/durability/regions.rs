//! Power cuts of the node of a region: what it acknowledged is in its data folder.

use serde_json::json;

use super::power_cuts::{is_full_run, loss_of};
use crate::support::eventually;
use crate::support::lossy_disk::LossyDisk;
use crate::support::processes::region::Region;

#[test]
fn a_node_keeps_an_acknowledged_revocation_after_a_power_cut_and_a_start_without_postgresql() {
    let Some(mut disk) = LossyDisk::mount() else {
        return;
    };
    let Some(mut region) = Region::start(1) else {
        return;
    };
    region.kill(0);
    disk.take(&region.data(0));
    let cuts = if is_full_run() { 12 } else { 3 };
    for cut in 0..cuts {
        region.restart(0);
        region.wait_for_members(1);
        let key = region.service_key().trim_start_matches("gw_sk_");
        let path = format!(
            "/accounts/demo/service-keys/{}",
            key.split('.').next().unwrap()
        );
        // Changes are kept in the journal as long as no copy of the records is due.
        for enabled in [true, false, true, false] {
            eventually("the node keeps the change", || {
                let change = json!({ "enabled": enabled });
                let reply = region.api(0).ask("PATCH", &path, &change);
                assert_eq!(reply.status, 200);
                reply.pending_nodes.is_empty().then_some(())
            });
        }
        region.kill(0);
        disk.cut_power(loss_of(cut));
        region.postgres.stop();
        region.restart(0);
        assert_eq!(region.request(0), "502 GW_SERVICE_KEY_INVALID", "cut {cut}");
        region.kill(0);
        region.postgres.resume();
    }
}
