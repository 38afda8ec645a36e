//! The hook program: its contract, its failures, and an order with it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gw_acme::{Hook, HookSettings, Orders, Proof, Publisher, State};
use tempfile::TempDir;

use super::programs::usable;
use super::servers::named::Named;
use super::servers::pebble::{Options, Pebble};
use super::{PROGRAMS, issue, run, settings};

fn program(folder: &TempDir, text: &str) -> PathBuf {
    let path = folder.path().join("hook");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn proof() -> Proof {
    Proof {
        name: "eu1.example.test".into(),
        value: "value".into(),
    }
}

#[test]
fn the_program_gets_arguments_and_environment_and_no_variable_of_the_gateway() {
    if !usable(&PROGRAMS) {
        return;
    }
    let named = Named::start("_acme-challenge.eu1 CNAME eu1.delegated.test.");
    let folder = tempfile::tempdir().unwrap();
    let text = format!(
        "echo \"$# $* $GW_ACME_ACTION $GW_ACME_NAME $GW_ACME_RECORD $GW_ACME_VALUE\" >> {}/calls",
        folder.path().display()
    );
    let hook = Hook::new(HookSettings {
        program: program(&folder, &text),
        dns_servers: vec![named.address],
    });
    run(hook.publish(&[proof()])).unwrap();
    run(hook.withdraw(&[proof()])).unwrap();
    let expected = ["add", "remove"].map(|action| {
        format!(
            "3 {action} eu1.delegated.test value {action} eu1.example.test eu1.delegated.test \
                 value\n"
        )
    });
    let calls = fs::read_to_string(folder.path().join("calls")).unwrap();
    assert_eq!(calls, expected.concat());
}

#[test]
fn a_program_that_fails_or_hangs_or_is_missing_is_named_with_its_output() {
    if !usable(&PROGRAMS) {
        return;
    }
    let named = Named::start("");
    let folder = tempfile::tempdir().unwrap();
    let limit = Duration::from_millis(300);
    let failure = |program: PathBuf| {
        let settings = HookSettings {
            program,
            dns_servers: vec![named.address],
        };
        let error = run(Hook::with_limit(settings, limit).publish(&[proof()])).unwrap_err();
        let begin = format!("acme.hook.program: {}", folder.path().display());
        assert!(error.message.starts_with(&begin), "{error}");
        error.message
    };
    let failed = failure(program(&folder, "echo no such zone >&2; exit 3"));
    assert!(failed.ends_with("exit status: 3: no such zone"), "{failed}");
    let much = failure(program(&folder, "yes | head -c 1000000; exit 1"));
    assert!(much.len() < 5000);
    let endless = failure(program(&folder, "exec yes"));
    assert!(endless.contains("killed because"), "{endless}");
    // Its child holds the output and outlives it, unless the whole group is killed.
    let hung = failure(program(&folder, "sleep 600 & sleep 600"));
    assert!(
        hung.contains("killed because it did not end within"),
        "{hung}"
    );
    // A daemon that the program leaves behind keeps the output open. It is not waited for.
    let left = failure(program(&folder, "setsid sleep 5 & echo left; exit 1"));
    assert!(left.ends_with("exit status: 1: left"), "{left}");
    let missing = failure(folder.path().join("missing"));
    assert!(missing.contains("check that the file exists"), "{missing}");
}

#[test]
fn an_order_with_a_hook_is_issued() {
    if !usable(&PROGRAMS) {
        return;
    }
    let named = Named::start("");
    let folder = tempfile::tempdir().unwrap();
    let port = named.address.port();
    let key = named.key_file();
    let text = format!(
        "case $1 in add) change=\"add $2 60 TXT $3\";; remove) change=\"delete $2 TXT $3\";; esac\n\
         printf 'server 127.0.0.1 {port}\\nupdate %s\\nsend\\n' \"$change\" | nsupdate -k {}",
        key.display()
    );
    let hook = Hook::new(HookSettings {
        program: program(&folder, &text),
        dns_servers: vec![named.address],
    });
    let pebble = Pebble::start(Options::new(named.address));
    let orders = Orders::new(settings(&pebble), Arc::new(hook));
    run(issue(&orders, &mut State::default())).unwrap();
    assert!(named.texts("_acme-challenge.eu1.example.test").is_empty());
}
