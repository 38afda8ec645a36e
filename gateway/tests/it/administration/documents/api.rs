//! Labels and fields of documents in the administration API.

use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::demo;

#[test]
fn a_label_is_set_compared_and_taken_away() {
    let demo = demo(None);
    let api = Api(&demo.about);
    let secret =
        json!({ "name": "labelled", "allowed_services": ["echo"], "managed_by": "git/one" });
    for (collection, new, id) in [
        (
            "/accounts",
            json!({ "id": "labelled", "managed_by": "git/one" }),
            "id",
        ),
        (
            "/accounts/demo/services",
            json!({ "id": "labelled", "managed_by": "git/one" }),
            "id",
        ),
        ("/accounts/demo/credentials", secret.clone(), "client_id"),
        ("/accounts/demo/service-keys", secret.clone(), "key_id"),
    ] {
        let created = api.ask("POST", collection, &new);
        assert_eq!(
            (created.status, &created.body["managed_by"]),
            (201, &json!("git/one"))
        );
        assert_eq!(api.ask("POST", collection, &new).status, 200);
        let mut other = new.clone();
        other["managed_by"] = "git/two".into();
        assert_eq!(
            api.ask("POST", collection, &other).status,
            409,
            "{collection}"
        );
        let mut silent = new.clone();
        silent.as_object_mut().unwrap().remove("managed_by");
        assert_eq!(api.ask("POST", collection, &silent).status, 200);

        let item = format!("{collection}/{}", created.body[id].as_str().unwrap());
        let refused = api.ask("PATCH", &item, &json!({ "managed_by": "two words" }));
        assert_eq!(
            (refused.status, &refused.body["field"]),
            (422, &json!("managed_by"))
        );
        let changed = api.ask("PATCH", &item, &json!({ "managed_by": "git/two" }));
        assert_eq!(changed.body["managed_by"], "git/two");
        assert_eq!(
            api.ask("PATCH", &item, &json!({})).body["managed_by"],
            "git/two"
        );
        let cleared = api.ask("PATCH", &item, &json!({ "managed_by": "" }));
        assert_eq!(
            (cleared.status, cleared.body.get("managed_by")),
            (200, None)
        );
        assert_eq!(api.get(&item).body.get("managed_by"), None::<&Value>);
    }
}
