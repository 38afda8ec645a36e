//! File systems without room that do not say so as a full disk does, with ENOSPC at a write.

use serde_json::{Value, json};

use super::{World, start};
use crate::support::eventually;
use crate::support::lossy_disk::{LossyDisk, NoRoomAt};
use crate::support::processes::prepared::Prepared;
use crate::support::stopwatch::within_a_second;

/// Deletes a key that a caller has used.
fn revoke(world: &World, (request, path): &(String, String)) {
    within_a_second("deletion of a key", || {
        let reply = world.api.ask("DELETE", path, &Value::Null);
        assert_eq!(reply.status, 204, "{reply:?}");
        assert_eq!(world.lets_in(request), world.all(false));
    });
}

#[test]
fn a_revocation_uses_the_reserve_beyond_a_quota_and_where_room_is_missing_at_a_sync() {
    for at in [NoRoomAt::Write, NoRoomAt::Sync] {
        let Some(disk) = LossyDisk::mount() else {
            return;
        };
        let prepared = Prepared::new();
        disk.take(&prepared.path("data"));
        let (served, _agent, world) = start(&prepared);
        world.create("/accounts/demo/services", &json!({ "id": "second" }));
        let keys = [(); 3].map(|()| world.key());
        for key in &keys {
            assert_eq!(world.lets_in(&key.0), world.all(true));
            disk.fill(at);
            revoke(&world, key);
        }
        served.log.line_with("uses the reserve");
        // A file that another part of the gateway deletes meanwhile makes room for some changes.
        let mut numbers = 1..;
        eventually("the change is refused", || {
            disk.fill(at);
            let account = json!({ "id": format!("new{}", numbers.next()?) });
            let reply = world.api.ask("POST", "/accounts", &account);
            (reply.status == 507).then_some(())
        });
    }
}
